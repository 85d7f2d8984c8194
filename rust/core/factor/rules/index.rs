//! Ops that look up: slices that move, gathers, scatters, sorts.

use super::{given::Given, shape::with_mismatch};
use crate::{
    error::Result,
    factor::rule::{Kind, Reduction, Rule},
    shown::counted,
};

pub(super) fn dynamic_slice(given: Given<'_>) -> Result<Rule> {
    given.at_least_one(1)?;
    let shape = given.operands[0];
    indices(given, 1)?;
    let sizes = given.of.each("slice_sizes", shape.len())?;
    let fits = sizes.iter().zip(shape).all(|(size, of)| 0 <= *size && size <= of);
    given.ensure(fits, || format!("`slice_sizes` is {sizes:?}, which does not fit the shape {shape:?}"))?;
    given.result(0, sizes)?;
    Ok(with_mismatch(given, Kind::Whole, true))
}

/// Scalars from operand `from` on, one for each dim of the first.
fn indices(given: Given<'_>, from: usize) -> Result<()> {
    let rank = given.operands[0].len();
    let count = given.operands.len() - from;
    given.ensure(count == rank, || {
        let [count, rank] = [counted(&count, "start index", "start indices"), counted(&rank, "dim", "dims")];
        format!("it has {count} for {rank}")
    })?;
    (from..given.operands.len()).try_for_each(|number| given.operand(number, &[]))
}

pub(super) fn dynamic_update_slice(given: Given<'_>) -> Result<Rule> {
    given.ensure(given.operands.len() >= 2, || "it needs an operand and an update".to_owned())?;
    given.at_least_one(1)?;
    let (shape, update) = (given.operands[0], given.operands[1]);
    indices(given, 2)?;
    given.result(0, shape)?;
    let fits = update.len() == shape.len() && update.iter().zip(shape).all(|(size, of)| size <= of);
    given
        .ensure(fits, || format!("the update of shape {update:?} does not fit into the operand of shape {shape:?}"))?;
    let mut builder = given.builder();
    let result = given.operands.len();
    for (dim, (size, part)) in shape.iter().zip(update).enumerate() {
        if size == part {
            builder.everywhere(dim, *size, Kind::Pass);
        } else {
            // Each device updates what it has of the operand, from the whole update.
            builder.factor(&[(0, dim), (result, dim)], *size, Kind::Pass);
            builder.factor(&[(1, dim)], *part, Kind::Whole);
        }
    }
    Ok(builder.build())
}

pub(super) fn sort(given: Given<'_>) -> Result<Rule> {
    given.at_least_one(given.operands.len())?;
    let shape = given.operands[0];
    for number in 0..given.operands.len() {
        given.operand(number, shape)?;
        given.result(number, shape)?;
    }
    let along = given.of.dim("dimension", shape.len())?;
    let alone = shape.iter().enumerate().all(|(dim, size)| dim == along || *size == 1);
    let mut builder = given.builder();
    for (dim, size) in shape.iter().enumerate() {
        let kind = if dim == along { Kind::Whole } else { Kind::Pass };
        builder.everywhere(dim, *size, kind).blocked = alone && dim == along;
    }
    Ok(builder.build())
}

pub(super) fn top_k(given: Given<'_>) -> Result<Rule> {
    given.counted(1, 2)?;
    given.rank(0, 1)?;
    let shape = given.operands[0];
    let last = shape.len() - 1;
    let mut expected = shape.to_vec();
    expected[last] = given.results[0].last().copied().unwrap_or(0);
    given.result(0, &expected)?;
    given.result(1, &expected)?;
    given.ensure(expected[last] <= shape[last], || {
        format!("it takes the {} largest, but the last dim has size {}", expected[last], shape[last])
    })?;
    Ok(with_mismatch(given, Kind::Whole, true))
}

pub(super) fn gather(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    let sizes = given.of.each("slice_sizes", given.operands[0].len())?;
    let kinds = |place: Place, size: i64, part: i64| match place {
        Place::Window { input, slices } if part != sizes[input] => Err(given.of.refused(format!(
            "dim {slices} of the result has size {part}, but slice_sizes[{input}] is {}",
            sizes[input]
        ))),
        Place::Window { .. } if part == 1 => Ok(Window::Apart(Kind::Sum)),
        Place::Window { .. } => Ok(Window::Together(Kind::Whole)),
        Place::Batch { .. } => Ok(Window::Together(Kind::Pass)),
        Place::Collapsed { .. } => Ok(Window::Together(if size == 1 { Kind::Whole } else { Kind::Sum })),
    };
    looked_up(given, [&[0], &[1], &[2]], Reduction::Add, kinds)
}

pub(super) fn scatter(given: Given<'_>) -> Result<Rule> {
    let inputs = given.results.len();
    given.counted(2 * inputs + 1, inputs)?;
    given.at_least_one(inputs)?;
    let (operand, updates) = (given.operands[0], given.operands[inputs + 1]);
    for input in 0..inputs {
        given.operand(input, operand)?;
        given.operand(inputs + 1 + input, updates)?;
        given.result(input, operand)?;
    }
    let reduction = given.reduction(Some("assign"))?;
    let kinds = |place: Place, _: i64, _: i64| {
        Ok(match place {
            Place::Window { .. } => Window::Apart(Kind::Whole),
            // Each device adds its updates; where the last one counts it needs them all.
            Place::Batch { input: None, .. } if reduction.is_some() => Window::Together(Kind::Sum),
            Place::Batch { input: None, .. } => Window::Together(Kind::Whole),
            Place::Batch { .. } | Place::Collapsed { .. } => Window::Together(Kind::Pass),
        })
    };
    let held: Vec<usize> = (0..inputs).chain(2 * inputs + 1..3 * inputs + 1).collect();
    let updated: Vec<usize> = (inputs + 1..2 * inputs + 1).collect();
    looked_up(given, [&held, &[inputs], &updated], reduction.unwrap_or(Reduction::Add), kinds)
}

/// A dim of the slices, or of the operand alone.
#[derive(Clone, Copy)]
enum Place {
    /// A dim of the operand's windows.
    Window { input: usize, slices: usize },
    /// A dim of the indices, and perhaps of the operand.
    Batch { input: Option<usize>, index: usize, slices: usize },
    /// A dim of the operand of which a window has one element.
    Collapsed { input: usize },
}

/// The factors of a place: one in all its tensors, or for a window of which a slice has a part one in the operand, and one in the
/// slices, which is whole.
enum Window {
    Together(Kind),
    Apart(Kind),
}

/// The rule of a gather or scatter, of tensors with the dims of the operand, of the indices and of the slices.
fn looked_up(
    given: Given<'_>,
    tensors: [&[usize]; 3],
    reduction: Reduction,
    kinds: impl Fn(Place, i64, i64) -> Result<Window>,
) -> Result<Rule> {
    let shape = |tensors: &[usize]| {
        let at = tensors[0];
        given.operands.get(at).unwrap_or_else(|| &given.results[at - given.operands.len()])
    };
    let (operand, indices, slices) = (shape(tensors[0]), shape(tensors[1]), shape(tensors[2]));
    // It may be the one after the last: then the indices are scalars.
    let vector = given.of.dim("index_vector_dim", indices.len() + 1)?;
    let (map, index) = (given.of.dims("start_index_map", operand.len())?, indices.get(vector).unwrap_or(&1));
    given.ensure(map.is_empty() || map.len() as i64 == *index, || {
        let [dims, numbers] = [counted(&map.len(), "dim", "dims"), counted(index, "number", "numbers")];
        format!("`start_index_map` has {dims}, but each index has {numbers}")
    })?;
    let mut builder = given.builder();
    builder.reduced_by(reduction);
    let mut factor = |dims: [Option<usize>; 3], size: i64, kind: Kind, blocked: bool| {
        let at = |(tensors, dim): (&[usize], Option<usize>)| {
            tensors.iter().filter_map(move |tensor| Some((*tensor, dim?))).collect::<Vec<_>>()
        };
        let mut places: Vec<_> = tensors.into_iter().zip(dims).flat_map(at).collect();
        places.sort_unstable();
        builder.factor(&places, size, kind).blocked = blocked;
    };
    for place in places(given, vector, [operand, indices, slices])? {
        let (dims, size, part) = match place {
            Place::Window { input, slices: to } => ([Some(input), None, Some(to)], operand[input], slices[to]),
            Place::Batch { input, index, slices: to } => ([input, Some(index), Some(to)], slices[to], slices[to]),
            Place::Collapsed { input } => ([Some(input), None, None], operand[input], operand[input]),
        };
        given.ensure(part <= size, || {
            let dim = dims[2].unwrap_or_default();
            format!("dim {dim} of the slices has size {part}, more than the {size} of the operand")
        })?;
        let partly = matches!(place, Place::Window { .. });
        match kinds(place, size, part)? {
            _ if partly && size == part => factor(dims, size, Kind::Pass, false),
            Window::Together(kind) => factor(dims, size, kind, partly),
            Window::Apart(kind) => {
                factor([dims[0], None, None], size, kind, false);
                factor([None, None, dims[2]], part, Kind::Whole, false);
            }
        }
    }
    if vector < indices.len() {
        factor([None, Some(vector), None], indices[vector], Kind::Whole, false);
    }
    Ok(builder.build())
}

/// The dims of the slices in their order, then those of the operand of which a window has one element.
fn places(given: Given<'_>, vector: usize, [operand, indices, slices]: [&[i64]; 3]) -> Result<Vec<Place>> {
    let offset = given.of.dims("offset_dims", slices.len())?;
    let collapsed = given.of.dims("collapsed_slice_dims", operand.len())?;
    let batch = given.of.dims("operand_batching_dims", operand.len())?;
    let of_indices = given.of.dims("start_indices_batching_dims", indices.len())?;
    let windows: Vec<usize> =
        (0..operand.len()).filter(|dim| !collapsed.contains(dim) && !batch.contains(dim)).collect();
    let batches: Vec<usize> = (0..indices.len()).filter(|dim| *dim != vector).collect();
    let others = slices.len() - offset.len();
    let fits = batch.len() == of_indices.len() && windows.len() == offset.len() && batches.len() == others;
    given.ensure(fits, || {
        format!(
            "operand {operand:?}, indices {indices:?} and slices {slices:?} do not fit: {} dims of the operand are in \
             windows, the slices have {} such dims and {others} others",
            windows.len(),
            offset.len()
        )
    })?;
    let (mut windows, mut batches) = (windows.into_iter(), batches.into_iter());
    let mut found = Vec::with_capacity(slices.len() + collapsed.len());
    for (dim, size) in slices.iter().enumerate() {
        if offset.contains(&dim) {
            found.extend(windows.next().map(|input| Place::Window { input, slices: dim }));
        } else if let Some(index) = batches.next() {
            let input = of_indices.iter().position(|other| *other == index).map(|at| batch[at]);
            let fits = indices[index] == *size && input.is_none_or(|input| operand[input] == *size);
            given.ensure(fits, || {
                format!(
                    "dim {dim} of the slices has size {size}, but dim {index} of the indices has {}",
                    indices[index]
                )
            })?;
            found.push(Place::Batch { input, index, slices: dim });
        }
    }
    found.extend(collapsed.into_iter().map(|input| Place::Collapsed { input }));
    Ok(found)
}
