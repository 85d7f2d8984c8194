//! Decompositions, transforms, random numbers, normalisation.

use super::given::Given;
use crate::{
    error::Result,
    factor::attributes::not_each,
    factor::rule::{Kind, Rule},
};

/// The rule of a decomposition of matrices: the dims of a batch pass, all others are whole. After those of the batch its results have
/// the dims that one of the `forms` says: `m` is the number of rows, `n` that of columns, `k` the lesser of the two.
pub(super) fn decomposed(given: Given<'_>, forms: &[&str]) -> Result<Rule> {
    given.counted(1, given.results.len())?;
    given.rank(0, 2)?;
    let shape = given.operands[0];
    let (batch, sides) = shape.split_at(shape.len() - 2);
    let size = |letter: char| match letter {
        'm' => sides[0],
        'n' => sides[1],
        _ => sides[0].min(sides[1]),
    };
    let expected = |dims: &str| batch.iter().copied().chain(dims.chars().map(size)).collect::<Vec<_>>();
    let fits = forms.iter().any(|form| form.split(' ').map(expected).eq(given.results.iter().copied()));
    given.ensure(fits, || {
        format!(
            "its results have the shapes {:?}; for an operand of {sides:?}, m x n, they must be one of {forms:?}",
            given.results
        )
    })?;
    let mut builder = given.passing(batch);
    let alike = usize::from(given.results[0] == shape);
    for (dim, size) in shape.iter().enumerate().skip(batch.len()) {
        builder.factor(&[(0, dim), (1, dim)][..=alike], *size, Kind::Whole);
    }
    for (number, result) in given.results.iter().enumerate().skip(alike) {
        for (dim, size) in result.iter().enumerate().skip(batch.len()) {
            builder.factor(&[(1 + number, dim)], *size, Kind::Whole);
        }
    }
    Ok(builder.build())
}

pub(super) fn eigh(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 2)?;
    given.rank(0, 2)?;
    let shape = given.operands[0];
    let batch = shape.len() - 2;
    given.ensure(shape[batch] == shape[batch + 1], || {
        format!("operands[0] has the shape {shape:?}, which is not a square matrix")
    })?;
    given.result(0, shape)?;
    given.result(1, &shape[..=batch])?;
    let mut builder = given.passing(&shape[..batch]);
    builder.factor(&[(0, batch), (1, batch)], shape[batch], Kind::Pass);
    builder.factor(&[(0, batch + 1), (1, batch + 1), (2, batch)], shape[batch + 1], Kind::Pass);
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
    given.ensure(fits, || format!("operands of the shapes {a:?} and {b:?} are not the two sides of one equation"))?;
    given.result(0, b)?;
    // `op(a) @ result = b` or `result @ op(a) = b`.
    let (outer, inner) = if left == turned { (batch + 1, batch) } else { (batch, batch + 1) };
    let mut builder = given.passing(&a[..batch]);
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
        not_each("fft_length", lengths.len(), from.len())
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
    let feature = given.of.dim("feature_index", shape.len())?;
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
