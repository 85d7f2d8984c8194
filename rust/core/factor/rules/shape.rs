//! Ops that put elements elsewhere.

use super::given::{Given, all_alike};
use crate::{
    error::Result,
    factor::attributes::not_each,
    factor::rule::{Kind, Rule},
    index::radix::{gcd, product},
    shown::counted,
};

pub(super) fn transpose(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    let shape = given.operands[0];
    let order = given.of.dims("permutation", shape.len())?;
    given.ensure(order.len() == shape.len(), || {
        format!("`permutation` is {order:?}; it must have each of the dims 0 to {} once", shape.len().saturating_sub(1))
    })?;
    given.result(0, &order.iter().map(|dim| shape[*dim]).collect::<Vec<_>>())?;
    let mut builder = given.builder();
    for (to, from) in order.iter().enumerate() {
        builder.factor(&[(0, *from), (1, to)], shape[*from], Kind::Pass);
    }
    Ok(builder.build())
}

pub(super) fn broadcast_in_dim(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    let (from, to) = (given.operands[0], given.results[0]);
    let dims = given.of.dims("broadcast_dimensions", to.len())?;
    given.ensure(dims.len() == from.len(), || not_each("broadcast_dimensions", dims.len(), from.len()))?;
    let mut builder = given.builder();
    for (dim, size) in to.iter().enumerate() {
        let source = dims.iter().position(|given| *given == dim);
        match source {
            Some(source) if from[source] == 1 && *size != 1 => {
                builder.factor(&[(0, source)], 1, Kind::Pass);
                builder.factor(&[(1, dim)], *size, Kind::Pass);
            }
            Some(source) => {
                given.ensure(from[source] == *size, || {
                    format!(
                        "dim {source} of operands[0] has size {}, but dim {dim} of the result has {size}",
                        from[source]
                    )
                })?;
                builder.factor(&[(0, source), (1, dim)], *size, Kind::Pass);
            }
            None => {
                builder.factor(&[(1, dim)], *size, Kind::Pass);
            }
        }
    }
    Ok(builder.build())
}

pub(super) fn concatenate(given: Given<'_>) -> Result<Rule> {
    given.at_least_one(1)?;
    let first = given.operands[0];
    let along = given.of.dim("dimension", first.len())?;
    let mut whole = first.to_vec();
    whole[along] = 0;
    for (number, operand) in given.operands.iter().enumerate() {
        let mut expected = first.to_vec();
        expected[along] = operand.get(along).copied().unwrap_or(0);
        given.operand(number, &expected)?;
        whole[along] = product("concatenate", &[1, whole[along].saturating_add(expected[along])])?;
    }
    given.result(0, &whole)?;
    // Of slices that are put together again each device needs a few of its neighbours' elements, of others all.
    let sliced = given.of.integer_or("of_slices", 0)? != 0;
    let kind = if sliced { Kind::Shift } else { Kind::Whole };
    Ok(all_alike(given, |dim| if dim == along { kind } else { Kind::Pass }))
}

pub(super) fn slice(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    let shape = given.operands[0];
    let (start, stop) = (given.of.each("start_indices", shape.len())?, given.of.each("limit_indices", shape.len())?);
    let strides = given.of.each_or_ones("strides", shape.len())?;
    let mut expected = Vec::with_capacity(shape.len());
    for (dim, size) in shape.iter().enumerate() {
        let (start, stop, stride) = (start[dim], stop[dim], strides[dim]);
        given.ensure(0 <= start && start <= stop && stop <= *size && stride >= 1, || {
            format!("it takes {start} to {stop} with stride {stride} of dim {dim}, which has size {size}")
        })?;
        expected.push((stop - start).div_euclid(stride) + i64::from((stop - start) % stride != 0));
    }
    given.result(0, &expected)?;
    Ok(with_mismatch(given, Kind::Shift, false))
}

pub(super) fn pad(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    given.operand(1, &[])?;
    let shape = given.operands[0];
    let each = |name| given.of.each(name, shape.len());
    let (low, high, inside) = (each("edge_padding_low")?, each("edge_padding_high")?, each("interior_padding")?);
    let padded = |dim: usize| {
        let gaps = (shape[dim] - 1).max(0).checked_mul(inside[dim])?;
        shape[dim].checked_add(low[dim])?.checked_add(high[dim])?.checked_add(gaps)
    };
    let expected: Vec<_> = (0..shape.len()).map(|dim| padded(dim).unwrap_or(-1)).collect();
    given.result(0, &expected)?;
    Ok(with_mismatch(given, Kind::Shift, false))
}

pub(super) fn reverse(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    given.result(0, given.operands[0])?;
    let turned = given.of.dims("dimensions", given.operands[0].len())?;
    Ok(all_alike(given, |dim| if turned.contains(&dim) { Kind::Shift } else { Kind::Pass }))
}

/// The rule of an op whose first operand and results have the same dims, of which those of another size are `kind`.
pub(super) fn with_mismatch(given: Given<'_>, kind: Kind, blocked: bool) -> Rule {
    let mut builder = given.builder();
    for (dim, (from, to)) in given.operands[0].iter().zip(given.results[0]).enumerate() {
        if from == to {
            builder.everywhere(dim, *from, Kind::Pass);
        } else {
            builder.everywhere(dim, *from, kind).blocked = blocked;
        }
    }
    builder.build()
}

pub(super) fn bitcast_convert(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    let (from, to) = (given.operands[0], given.results[0]);
    let common = from.len().min(to.len());
    let apart = from.len().max(to.len()) - common;
    given.ensure(apart <= 1 && from[..common] == to[..common], || {
        format!("results[0] has the shape {to:?}; it must be {from:?}, or that with one dim more or less at its end")
    })?;
    let mut builder = given.passing(&from[..common]);
    if from.len() > common {
        builder.factor(&[(0, common)], from[common], Kind::Whole);
    }
    if to.len() > common {
        builder.factor(&[(1, common)], to[common], Kind::Whole);
    }
    Ok(builder.build())
}

/// Factors that both shapes have in common, as large as can be; where they have none, each its own.
pub(super) fn reshape(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    let shapes = [given.operands[0], given.results[0]];
    let elements = [product("operands[0]", shapes[0])?, product("results[0]", shapes[1])?];
    given.ensure(elements[0] == elements[1], || {
        let elements = elements.map(|count| counted(&count, "element", "elements"));
        format!("the operand {:?} has {}, but the result {:?} has {}", shapes[0], elements[0], shapes[1], elements[1])
    })?;
    let mut builder = given.builder();
    if elements[0] == 0 {
        for (tensor, shape) in shapes.iter().enumerate() {
            for (dim, size) in shape.iter().enumerate() {
                builder.factor(&[(tensor, dim)], *size, Kind::Whole);
            }
        }
        return Ok(builder.build());
    }
    // For each side: the dim that is next, the product of the dims up to it, and that of the factors so far.
    let (mut dim, mut dims, mut factors) = ([0; 2], [1_i64; 2], [1_i64; 2]);
    while (0..2).any(|side| dim[side] < shapes[side].len()) {
        if let Some(side) = (0..2).find(|&side| shapes[side].get(dim[side]) == Some(&1)) {
            builder.factor(&[(side, dim[side])], 1, Kind::Pass);
            dim[side] += 1;
            continue;
        }
        for side in 0..2 {
            if dim[side] < shapes[side].len() && dims[side] == factors[side] {
                dims[side] *= shapes[side][dim[side]];
            }
        }
        let next = [dims[0] / factors[0], dims[1] / factors[1]];
        let common = gcd(next[0], next[1]);
        if factors[0] == factors[1] && common > 1 {
            builder.factor(&[(0, dim[0]), (1, dim[1])], common, Kind::Pass);
            factors = [factors[0] * common, factors[1] * common];
        } else if factors[0] == factors[1] {
            for side in 0..2 {
                builder.factor(&[(side, dim[side])], next[side], Kind::Pass);
                factors[side] *= next[side];
            }
        } else {
            // The side that is behind gets a factor: one that brings it level, or one that leaves the common one.
            let side = usize::from(factors[0] > factors[1]);
            let (behind, ahead) = (factors[side], factors[1 - side]);
            let own = if ahead % behind == 0 && next[side] % (ahead / behind) == 0 {
                ahead / behind
            } else if next[side] > common {
                next[side] / common
            } else {
                next[side]
            };
            builder.factor(&[(side, dim[side])], own, Kind::Pass);
            factors[side] *= own;
        }
        for side in 0..2 {
            if dim[side] < shapes[side].len() && dims[side] == factors[side] {
                dim[side] += 1;
            }
        }
    }
    Ok(builder.build())
}
