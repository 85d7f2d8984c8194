//! Ops that add up: products, convolutions, reductions, windows.

use super::given::{Given, all_alike};
use crate::{
    error::Result,
    factor::attributes::not_each,
    factor::rule::{Kind, Reduction, Rule},
};

pub(super) fn dot_general(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    let (lhs, rhs) = (given.operands[0], given.operands[1]);
    let dims = |name, shape: &[i64]| given.of.dims(name, shape.len());
    let batch = [dims("lhs_batching_dimensions", lhs)?, dims("rhs_batching_dimensions", rhs)?];
    let summed = [dims("lhs_contracting_dimensions", lhs)?, dims("rhs_contracting_dimensions", rhs)?];
    for (what, [left, right]) in [("batching", &batch), ("contracting", &summed)] {
        given.ensure(left.len() == right.len(), || {
            format!("{what} dims: {} on the left, but {} on the right", left.len(), right.len())
        })?;
        for (left, right) in left.iter().zip(right) {
            given.ensure(lhs[*left] == rhs[*right], || {
                format!("{what} dims {left} and {right} have different sizes, {} and {}", lhs[*left], rhs[*right])
            })?;
        }
    }
    for side in 0..2 {
        let twice = batch[side].iter().find(|dim| summed[side].contains(dim));
        if let Some(twice) = twice {
            let why = format!("dim {twice} of operands[{side}] is both a batching and a contracting dim");
            return Err(given.of.refused(why));
        }
    }
    let free = |side: usize| {
        let [batch, summed] = [&batch[side], &summed[side]];
        (0..given.operands[side].len()).filter(|dim| !batch.contains(dim) && !summed.contains(dim))
    };
    let left = batch[0].iter().copied().chain(free(0)).map(|dim| &lhs[dim]);
    let result = left.chain(free(1).map(|dim| &rhs[dim]));
    given.result(0, result)?;
    let mut builder = given.builder();
    let mut to = 0..;
    for ((l, r), to) in batch[0].iter().zip(&batch[1]).zip(&mut to) {
        builder.factor(&[(0, *l), (1, *r), (2, to)], lhs[*l], Kind::Pass);
    }
    for (l, to) in free(0).zip(&mut to) {
        builder.factor(&[(0, l), (2, to)], lhs[l], Kind::Pass);
    }
    for (r, to) in free(1).zip(to) {
        builder.factor(&[(1, r), (2, to)], rhs[r], Kind::Pass);
    }
    for (l, r) in summed[0].iter().zip(&summed[1]) {
        builder.factor(&[(0, *l), (1, *r)], lhs[*l], Kind::Sum);
    }
    Ok(builder.build())
}

pub(super) fn reduce(given: Given<'_>) -> Result<Rule> {
    let inputs = given.results.len();
    given.counted(2 * inputs, inputs)?;
    given.at_least_one(inputs)?;
    let shape = given.operands[0];
    let reduced = given.of.dims("dimensions", shape.len())?;
    let kept: Vec<i64> = (0..shape.len()).filter(|dim| !reduced.contains(dim)).map(|dim| shape[dim]).collect();
    for input in 0..inputs {
        given.operand(input, shape)?;
        given.operand(inputs + input, &[])?;
        given.result(input, &kept)?;
    }
    let reduction = given.reduction(None)?.unwrap_or(Reduction::Add);
    let mut builder = given.builder();
    builder.reduced_by(reduction);
    let mut to = 0;
    for (dim, size) in shape.iter().enumerate() {
        let mut at: Vec<_> = (0..inputs).map(|input| (input, dim)).collect();
        let kind = if reduced.contains(&dim) { Kind::Sum } else { Kind::Pass };
        if kind == Kind::Pass {
            at.extend((0..inputs).map(|input| (2 * inputs + input, to)));
            to += 1;
        }
        builder.factor(&at, *size, kind);
    }
    Ok(builder.build())
}

/// The number of windows of a size, so far apart, in a padded dim; none if there is no such dim.
fn windows_of(size: i64, window: i64, stride: i64, [low, high]: [i64; 2]) -> Option<i64> {
    let padded = size.checked_add(low)?.checked_add(high).filter(|_| stride >= 1)?;
    Some(if padded < window { 0 } else { (padded - window) / stride + 1 })
}

/// For each dim the number of windows, and whether each window is one element with nothing around it.
fn windows(given: Given<'_>, shape: &[i64]) -> Result<Vec<(i64, bool)>> {
    let rank = shape.len();
    let window = given.of.each("window_dimensions", rank)?;
    let strides = given.of.each_or_ones("window_strides", rank)?;
    let padding = given.of.each_pair("padding", rank)?;
    let of = |dim: usize| {
        let (size, window, stride, [low, high]) = (shape[dim], window[dim], strides[dim], padding[dim]);
        let count = windows_of(size, window, stride, [low, high]).filter(|_| window >= 1 && size + low + high >= 0);
        let count = count.ok_or_else(|| {
            let padded = format!("padded by {low} and {high}");
            given
                .of
                .refused(format!("dim {dim} of size {size}, {padded}, has no windows of {window} with stride {stride}"))
        })?;
        Ok((count, (window, stride, low, high) == (1, 1, 0, 0)))
    };
    (0..rank).map(of).collect()
}

pub(super) fn reduce_window(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    given.operand(1, &[])?;
    let windows = windows(given, given.operands[0])?;
    given.result(0, &windows.iter().map(|(count, _)| *count).collect::<Vec<_>>())?;
    Ok(all_alike(given, |dim| if windows[dim].1 { Kind::Pass } else { Kind::Shift }))
}

pub(super) fn select_and_scatter(given: Given<'_>) -> Result<Rule> {
    given.counted(3, 1)?;
    given.operand(2, &[])?;
    let shape = given.operands[0];
    let windows = windows(given, shape)?;
    given.operand(1, &windows.iter().map(|(count, _)| *count).collect::<Vec<_>>())?;
    given.result(0, shape)?;
    let mut builder = given.builder();
    for (dim, (count, alone)) in windows.iter().enumerate() {
        if *alone {
            builder.everywhere(dim, shape[dim], Kind::Pass);
        } else {
            builder.factor(&[(1, dim)], *count, Kind::Whole);
            builder.factor(&[(0, dim), (3, dim)], shape[dim], Kind::Shift);
        }
    }
    Ok(builder.build())
}

/// The dims of one tensor of a convolution: its two named ones, then the spatial ones in their order.
fn spec(given: Given<'_>, name: &str, named: [&str; 2], shape: &[i64]) -> Result<([usize; 2], Vec<usize>)> {
    let words = given.of.words(name)?;
    let spatial = shape.len().saturating_sub(2);
    let numbers: Vec<String> = (0..spatial).map(|number| number.to_string()).collect();
    let find = |wanted: &str| {
        let found = words.iter().position(|word| word == wanted);
        found.ok_or_else(|| given.of.refused(format!("`{name}` is {words:?}, and lacks {wanted:?}")))
    };
    given.ensure(words.len() == shape.len(), || not_each(name, words.len(), shape.len()))?;
    Ok(([find(named[0])?, find(named[1])?], numbers.iter().map(|number| find(number)).collect::<Result<_>>()?))
}

pub(super) fn convolution(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    let (lhs, rhs, out) = (given.operands[0], given.operands[1], given.results[0]);
    let ([batch, feature], spatial) = spec(given, "lhs_spec", ["b", "f"], lhs)?;
    let ([to, from], kernel) = spec(given, "rhs_spec", ["o", "i"], rhs)?;
    let ([out_batch, out_feature], out_spatial) = spec(given, "out_spec", ["b", "f"], out)?;
    let of = given.of;
    let (groups, batches) = (of.integer_or("feature_group_count", 1)?, of.integer_or("batch_group_count", 1)?);
    let fits = groups >= 1
        && batches >= 1
        && (groups == 1 || batches == 1)
        && spatial.len() == kernel.len()
        && spatial.len() == out_spatial.len()
        && Some(lhs[feature]) == rhs[from].checked_mul(groups)
        && Some(lhs[batch]) == out[out_batch].checked_mul(batches)
        && out[out_feature] == rhs[to]
        && rhs[to] % (groups * batches) == 0;
    given.ensure(fits, || {
        format!("{lhs:?} and {rhs:?} with {groups} feature and {batches} batch groups do not give {out:?}")
    })?;
    let rank = spatial.len();
    let (strides, padding) = (of.each_or_ones("window_strides", rank)?, of.each_pair("padding", rank)?);
    let (spread, apart) = (of.each_or_ones("lhs_dilation", rank)?, of.each_or_ones("rhs_dilation", rank)?);
    for at in 0..rank {
        let dilated = |size: i64, by: i64| if size == 0 { Some(0) } else { (size - 1).checked_mul(by)?.checked_add(1) };
        let (image, window) = (dilated(lhs[spatial[at]], spread[at]), dilated(rhs[kernel[at]], apart[at]));
        let pair = image.zip(window);
        let count = pair.and_then(|(image, window)| windows_of(image, window, strides[at], padding[at]));
        given.ensure(count == Some(out[out_spatial[at]]), || {
            let expected = count.map_or_else(|| "no size".to_owned(), |count| count.to_string());
            format!("spatial dim {at} of the result is {}, but the operands give {expected}", out[out_spatial[at]])
        })?;
    }

    let mut builder = given.builder();
    if batches > 1 {
        builder.factor(&[(0, batch), (1, to), (2, out_feature)], batches, Kind::Pass);
    }
    builder.factor(&[(0, batch), (2, out_batch)], out[out_batch], Kind::Pass);
    for at in 0..rank {
        // A spatial dim is cut by windows or by places in them; the larger of the two is the major factor.
        let (input, place, window) = (spatial[at], kernel[at], out_spatial[at]);
        let (windows, places) = (out[window], rhs[place]);
        let mut left = lhs[input];
        let by_places = |left: i64| (places.min(left), Kind::Sum, (1, place));
        let by_windows = |left: i64| (windows.min(left), Kind::Shift, (2, window));
        for windows_now in if windows >= places { [true, false] } else { [false, true] } {
            let (size, kind, other) = if windows_now { by_windows(left) } else { by_places(left) };
            if size > 1 {
                builder.factor(&[(0, input), other], size, kind);
                left /= size;
            }
        }
    }
    if groups > 1 {
        builder.factor(&[(0, feature), (1, to), (2, out_feature)], groups, Kind::Pass);
    }
    builder.factor(&[(0, feature), (1, from)], rhs[from], Kind::Sum);
    let own = out[out_feature] / (batches * groups);
    if own > 1 {
        builder.factor(&[(1, to), (2, out_feature)], own, Kind::Pass);
    }
    Ok(builder.build())
}
