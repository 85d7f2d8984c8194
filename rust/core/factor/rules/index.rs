//! Ops that look up: slices that move, gathers, scatters, sorts.

use super::{given::Given, shape::with_mismatch};
use crate::{
    error::Result,
    factor::rule::{Kind, Reduction, Rule},
};

pub(super) fn dynamic_slice(given: Given<'_>) -> Result<Rule> {
    given.at_least_one(1)?;
    let shape = given.operands[0];
    indices(given, 1)?;
    let sizes = given.of.each("slice_sizes", shape.len())?;
    let fits = sizes.iter().zip(shape).all(|(size, of)| 0 <= *size && size <= of);
    given.ensure(fits, || format!("`slice_sizes` is {sizes:?}, of the shape {shape:?}"))?;
    given.result(0, sizes)?;
    Ok(with_mismatch(given, Kind::Whole, true))
}

/// Scalars from operand `from` on, one for each dim of the first.
fn indices(given: Given<'_>, from: usize) -> Result<()> {
    let rank = given.operands[0].len();
    let count = given.operands.len() - from;
    given.ensure(count == rank, || format!("it has {count} start indices for {rank} dims"))?;
    (from..given.operands.len()).try_for_each(|number| given.operand(number, &[]))
}

pub(super) fn dynamic_update_slice(given: Given<'_>) -> Result<Rule> {
    given.ensure(given.operands.len() >= 2, || "it has an operand and an update".to_owned())?;
    given.at_least_one(1)?;
    let (shape, update) = (given.operands[0], given.operands[1]);
    indices(given, 2)?;
    given.result(0, shape)?;
    let fits = update.len() == shape.len() && update.iter().zip(shape).all(|(size, of)| size <= of);
    given.ensure(fits, || format!("the update has the shape {update:?}, the operand {shape:?}"))?;
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
    let along = usize::try_from(given.of.integer("dimension")?).unwrap_or(usize::MAX);
    given.ensure(along < shape.len(), || format!("`dimension` is not one of the {} dims", shape.len()))?;
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
    given.ensure(expected[last] <= shape[last], || format!("it takes {} of {}", expected[last], shape[last]))?;
    Ok(with_mismatch(given, Kind::Whole, true))
}

pub(super) fn gather(given: Given<'_>) -> Result<Rule> {
    given.counted(2, 1)?;
    let (operand, indices, result) = (given.operands[0], given.operands[1], given.results[0]);
    let sizes = given.of.each("slice_sizes", operand.len())?;
    let mut builder = given.builder();
    let windows = Windows::new(
        given,
        "offset_dims",
        "collapsed_slice_dims",
        ["operand_batching_dims", "start_indices_batching_dims"],
    )?;
    let with = |input: Option<usize>, index: Option<usize>, slices: Option<usize>| {
        let place = |tensor: usize, dim: Option<usize>| dim.map(|dim| (tensor, dim));
        [place(0, input), place(1, index), place(2, slices)].into_iter().flatten().collect::<Vec<_>>()
    };
    for place in windows.places(given, operand, indices, result)? {
        match place {
            Place::Window { input, slices } => {
                let (size, part) = (operand[input], result[slices]);
                given.ensure(part == sizes[input] && part <= size, || {
                    format!("dim {slices} of the result is {part}, the slices have {} of {size}", sizes[input])
                })?;
                if size == part {
                    builder.factor(&with(Some(input), None, Some(slices)), size, Kind::Pass);
                } else if part == 1 {
                    builder.factor(&with(Some(input), None, None), size, Kind::Sum);
                    builder.factor(&with(None, None, Some(slices)), part, Kind::Whole);
                } else {
                    builder.factor(&with(Some(input), None, Some(slices)), size, Kind::Whole).blocked = true;
                }
            }
            Place::Batch { input, index, slices } => {
                builder.factor(&with(input, Some(index), Some(slices)), result[slices], Kind::Pass);
            }
        }
    }
    for dim in &windows.collapsed {
        let kind = if operand[*dim] == 1 { Kind::Whole } else { Kind::Sum };
        builder.factor(&[(0, *dim)], operand[*dim], kind);
    }
    if windows.vector < indices.len() {
        builder.factor(&[(1, windows.vector)], indices[windows.vector], Kind::Whole);
    }
    Ok(builder.build())
}

pub(super) fn scatter(given: Given<'_>) -> Result<Rule> {
    let inputs = given.results.len();
    given.counted(2 * inputs + 1, inputs)?;
    given.at_least_one(inputs)?;
    let (operand, indices, updates) = (given.operands[0], given.operands[inputs], given.operands[inputs + 1]);
    for input in 0..inputs {
        given.operand(input, operand)?;
        given.operand(inputs + 1 + input, updates)?;
        given.result(input, operand)?;
    }
    let body = given.of.word("body")?;
    let reduction = Reduction::named(body);
    given.ensure(reduction.is_some() || body == "assign", || {
        let names: Vec<_> = Reduction::ALL.iter().map(|(_, name)| *name).collect();
        format!("`body` is {body:?}; it is \"assign\" or one of {names:?}")
    })?;
    let mut builder = given.builder();
    builder.reduced_by(reduction.unwrap_or(Reduction::Add));
    let windows = Windows::new(
        given,
        "offset_dims",
        "collapsed_slice_dims",
        ["operand_batching_dims", "start_indices_batching_dims"],
    )?;
    let with = |input: Option<usize>, index: Option<usize>, slices: Option<usize>| {
        let mut at = Vec::with_capacity(3 * inputs + 1);
        at.extend((0..inputs).filter_map(|number| input.map(|dim| (number, dim))));
        at.extend(index.map(|dim| (inputs, dim)));
        at.extend((0..inputs).filter_map(|number| slices.map(|dim| (inputs + 1 + number, dim))));
        at.extend((0..inputs).filter_map(|number| input.map(|dim| (2 * inputs + 1 + number, dim))));
        at
    };
    for place in windows.places(given, operand, indices, updates)? {
        match place {
            Place::Window { input, slices } => {
                let (size, part) = (operand[input], updates[slices]);
                given.ensure(part <= size, || format!("dim {slices} of the updates is {part}, of {size}"))?;
                if size == part {
                    builder.factor(&with(Some(input), None, Some(slices)), size, Kind::Pass);
                } else {
                    builder.factor(&with(Some(input), None, None), size, Kind::Whole);
                    builder.factor(&with(None, None, Some(slices)), part, Kind::Whole);
                }
            }
            Place::Batch { input, index, slices } => {
                // Each device adds its updates; where the last one counts it needs them all.
                let kind = match (input, reduction) {
                    (Some(_), _) => Kind::Pass,
                    (None, Some(_)) => Kind::Sum,
                    (None, None) => Kind::Whole,
                };
                builder.factor(&with(input, Some(index), Some(slices)), updates[slices], kind);
            }
        }
    }
    for dim in &windows.collapsed {
        builder.factor(&with(Some(*dim), None, None), operand[*dim], Kind::Pass);
    }
    if windows.vector < indices.len() {
        builder.factor(&with(None, Some(windows.vector), None), indices[windows.vector], Kind::Whole);
    }
    Ok(builder.build())
}

/// The dims of a gather or scatter.
struct Windows {
    /// The dims of the slices that are within a window.
    offset: Vec<usize>,
    /// The dims of the operand that a window has one element of.
    collapsed: Vec<usize>,
    /// The dims that operand and indices have in common.
    batch: [Vec<usize>; 2],
    /// The dim of the indices that lists the coordinates of one; their rank, if each is a number.
    vector: usize,
}

/// A dim of the slices.
enum Place {
    /// A dim of the operand's windows.
    Window { input: usize, slices: usize },
    /// A dim of the indices, and perhaps of the operand.
    Batch { input: Option<usize>, index: usize, slices: usize },
}

impl Windows {
    fn new(given: Given<'_>, offset: &str, collapsed: &str, batch: [&str; 2]) -> Result<Self> {
        let inputs = if given.of.op == "scatter" { given.results.len() } else { 1 };
        let (operand, indices) = (given.operands[0], given.operands[inputs]);
        let slices = if given.of.op == "scatter" { given.operands[inputs + 1] } else { given.results[0] };
        let vector = given.of.integer("index_vector_dim")?;
        given.ensure((0..=indices.len() as i64).contains(&vector), || {
            format!("`index_vector_dim` is {vector}; the indices have {} dims", indices.len())
        })?;
        Ok(Self {
            offset: given.of.dims(offset, slices.len())?,
            collapsed: given.of.dims(collapsed, operand.len())?,
            batch: [given.of.dims(batch[0], operand.len())?, given.of.dims(batch[1], indices.len())?],
            vector: vector as usize,
        })
    }

    fn places(&self, given: Given<'_>, operand: &[i64], indices: &[i64], slices: &[i64]) -> Result<Vec<Place>> {
        let windows: Vec<usize> =
            (0..operand.len()).filter(|dim| !self.collapsed.contains(dim) && !self.batch[0].contains(dim)).collect();
        let batches: Vec<usize> = (0..indices.len()).filter(|dim| *dim != self.vector).collect();
        given.ensure(
            self.batch[0].len() == self.batch[1].len()
                && windows.len() == self.offset.len()
                && batches.len() == slices.len() - self.offset.len(),
            || {
                format!(
                    "operand {operand:?}, indices {indices:?} and slices {slices:?} do not fit: {} dims of the operand are \
                     in windows, the slices have {} such dims and {} others",
                    windows.len(),
                    self.offset.len(),
                    slices.len() - self.offset.len()
                )
            },
        )?;
        let (mut windows, mut batches) = (windows.into_iter(), batches.into_iter());
        let place = |slices: usize| {
            if self.offset.contains(&slices) {
                return Some(Place::Window { input: windows.next()?, slices });
            }
            let index = batches.next()?;
            let input = self.batch[1].iter().position(|dim| *dim == index).map(|at| self.batch[0][at]);
            Some(Place::Batch { input, index, slices })
        };
        let places: Vec<Place> = (0..slices.len()).map_while(place).collect();
        for place in &places {
            if let Place::Batch { input, index, slices: dim } = place {
                let sizes = (indices[*index], slices[*dim], input.map(|input| operand[input]));
                given.ensure(sizes.0 == sizes.1 && sizes.2.is_none_or(|size| size == sizes.0), || {
                    format!("dim {dim} of the slices is {}, dim {index} of the indices {}", sizes.1, sizes.0)
                })?;
            }
        }
        Ok(places)
    }
}
