//! Decompositions, transforms, random numbers, normalisation.

use super::given::{Given, all_alike};
use crate::{
    error::Result,
    factor::rule::{Kind, Rule},
};

pub(super) fn cholesky(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    given.rank(0, 2)?;
    given.result(0, given.operands[0])?;
    let batch = given.operands[0].len() - 2;
    Ok(all_alike(given, |dim| if dim < batch { Kind::Pass } else { Kind::Whole }))
}

pub(super) fn eigh(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 2)?;
    given.rank(0, 2)?;
    let shape = given.operands[0];
    let batch = shape.len() - 2;
    given.ensure(shape[batch] == shape[batch + 1], || format!("{shape:?} is not a matrix of equal sides"))?;
    given.result(0, shape)?;
    given.result(1, &shape[..=batch])?;
    let mut builder = given.builder();
    for (dim, size) in shape[..batch].iter().enumerate() {
        builder.everywhere(dim, *size, Kind::Pass);
    }
    builder.factor(&[(0, batch), (1, batch)], shape[batch], Kind::Pass);
    builder.factor(&[(0, batch + 1), (1, batch + 1), (2, batch)], shape[batch + 1], Kind::Pass);
    Ok(builder.build())
}

pub(super) fn qr(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 2)?;
    given.rank(0, 2)?;
    let shape = given.operands[0];
    let batch = shape.len() - 2;
    let mut least = shape[..=batch].to_vec();
    least[batch] = shape[batch].min(shape[batch + 1]);
    given.result(0, shape)?;
    given.result(1, &least)?;
    let mut builder = given.builder();
    for (dim, size) in shape[..batch].iter().enumerate() {
        builder.everywhere(dim, *size, Kind::Pass);
    }
    builder.factor(&[(0, batch), (1, batch)], shape[batch], Kind::Whole);
    builder.factor(&[(0, batch + 1), (1, batch + 1)], shape[batch + 1], Kind::Whole);
    builder.factor(&[(2, batch)], least[batch], Kind::Whole);
    Ok(builder.build())
}

pub(super) fn triangular_solve(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    given.rank(0, 2)?;
    let (a, b) = (given.operands[0], given.operands[1]);
    let (batch, rank) = (a.len() - 2, a.len());
    let left = given.of.integer("left_side")? != 0;
    let turned = given.of.integer_or("transpose_a", 0)? != 0;
    let side = if left { batch } else { batch + 1 };
    let fits = a[batch] == a[batch + 1] && b.len() == rank && a[..batch] == b[..batch] && b[side] == a[batch];
    given.ensure(fits, || format!("{a:?} and {b:?} are not the sides of an equation"))?;
    given.result(0, b)?;
    // `op(a) @ result = b` or `result @ op(a) = b`.
    let (outer, inner) = if left == turned { (batch + 1, batch) } else { (batch, batch + 1) };
    let mut builder = given.builder();
    for (dim, size) in a[..batch].iter().enumerate() {
        builder.everywhere(dim, *size, Kind::Pass);
    }
    let other = if left { batch + 1 } else { batch };
    if !left {
        builder.factor(&[(1, other), (2, other)], b[other], Kind::Whole);
    }
    builder.factor(&[(0, outer), (1, side)], a[outer], Kind::Whole);
    if left {
        builder.factor(&[(1, other), (2, other)], b[other], Kind::Whole);
    }
    builder.factor(&[(0, inner), (2, side)], a[inner], Kind::Whole);
    Ok(builder.build())
}

pub(super) fn fft(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 1)?;
    let (from, to) = (given.operands[0], given.results[0]);
    let lengths = given.of.integers("fft_length")?;
    given.ensure(!lengths.is_empty() && lengths.len() <= from.len(), || {
        format!("`fft_length` has {} entries for {} dims", lengths.len(), from.len())
    })?;
    let last = from.len() - 1;
    given.ensure(to.len() == from.len() && to[..last] == from[..last], || {
        format!("the result has the shape {to:?}; it must be that of the operand, {from:?}, except for the last dim")
    })?;
    let batch = from.len() - lengths.len();
    let mut builder = given.builder();
    for (dim, size) in from.iter().enumerate() {
        let kind = if dim < batch { Kind::Pass } else { Kind::Whole };
        builder.everywhere(dim, *size, kind).blocked = dim == last && from[last] != to[last];
    }
    Ok(builder.build())
}

pub(super) fn rng_bit_generator(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 2)?;
    given.result(0, given.operands[0])?;
    let mut builder = given.builder();
    for (dim, size) in given.operands[0].iter().enumerate() {
        builder.factor(&[(0, dim), (1, dim)], *size, Kind::Whole).blocked = true;
    }
    for (dim, size) in given.results[1].iter().enumerate() {
        builder.factor(&[(2, dim)], *size, Kind::Pass);
    }
    Ok(builder.build())
}

pub(super) fn batch_norm_inference(given: Given<'_>) -> Result<Rule> {
    given.counted(5, 1)?;
    let shape = given.operands[0];
    let feature = usize::try_from(given.of.integer("feature_index")?).unwrap_or(usize::MAX);
    given.ensure(feature < shape.len(), || format!("`feature_index` is not one of the {} dims", shape.len()))?;
    (1..5).try_for_each(|number| given.operand(number, &shape[feature..=feature]))?;
    given.result(0, shape)?;
    let mut builder = given.builder();
    for (dim, size) in shape.iter().enumerate() {
        let mut at = vec![(0, dim)];
        if dim == feature {
            at.extend((1..5).map(|number| (number, 0)));
        }
        at.push((5, dim));
        builder.factor(&at, *size, Kind::Pass);
    }
    Ok(builder.build())
}
