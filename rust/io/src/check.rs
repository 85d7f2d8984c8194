//! The refusals of a tensor before anything is done.

use std::sync::Arc;

use shardwise_core::{
    error::Error as CoreError,
    region::{Region, Regions},
    tiling::{Pieces, Poll, listed::Listed, tiles::Tiles},
};

use crate::{
    error::{Error, Result, no_room},
    piece::{Piece, Tensor},
};

/// The pieces after which there is a poll.
const PIECES_PER_POLL: usize = 1 << 12;

pub(crate) fn check_box(tensor: &Tensor, piece: &Piece<'_>) -> std::result::Result<(), String> {
    for dim in 0..tensor.shape.len() - 1 {
        let (start, stop, size) = (piece.region.start()[dim], piece.region.stop()[dim], tensor.shape[dim]);
        if !(0 <= start && start <= stop && stop <= size) {
            return Err(format!("is [{start}, {stop}) along dim {dim}, which is not within [0, {size})"));
        }
    }
    Ok(())
}

/// Checks that a piece lies within its holder; `limits` are the holder's first byte, its end, and whether it is a file.
pub(crate) fn check_span(piece: &Piece<'_>, limits: Option<(i64, i64, bool)>) -> std::result::Result<(), String> {
    let Some((low, high, file)) = limits else {
        return Err(format!("its holder is {}, which is not in the job", piece.holder as i64));
    };
    if piece.volume() == 0 {
        return Ok(());
    }
    if file && piece.region.extents().zip(piece.strides).any(|(extent, &stride)| extent > 1 && stride < 0) {
        return Err("has a negative stride, which only memory can have".to_owned());
    }
    match piece.span() {
        Some((start, stop)) if low <= start && stop <= high => Ok(()),
        Some((start, stop)) => Err(format!("needs bytes {start} to {stop} of its holder, which has {low} to {high}")),
        None => Err("needs bytes beyond 2**63 - 1 of its holder".to_owned()),
    }
}

/// The list that there may be no memory for here.
pub(crate) const BOXES: &str = "the boxes of the pieces";

/// The boxes, to be found by position; or two of them, by their numbers, that share an element.
///
/// # Errors
/// [`Error::Memory`] if there is none for the list, [`Error::Interrupted`] if `poll` says so.
pub(crate) fn listed<'a>(
    boxes: impl ExactSizeIterator<Item = Region<'a>>,
    rank: usize,
    poll: Poll<'_>,
) -> Result<Apart> {
    let mut regions = Regions::new(rank);
    regions.reserve(boxes.len()).map_err(no_room(BOXES))?;
    for region in boxes {
        regions.push(region).map_err(no_room(BOXES))?;
    }
    let pieces = Pieces::one_each(regions).map_err(no_room(BOXES))?;
    match Listed::new(Arc::new(pieces), false, poll) {
        Ok(listed) => Ok(Ok(listed)),
        Err(CoreError::BoxesOverlap { first, second, .. }) => Ok(Err((first.min(second), first.max(second)))),
        Err(CoreError::Interrupted) => Err(Error::Interrupted),
        Err(_) => Err(Error::Memory { what: BOXES }),
    }
}

/// Boxes that share no element; or two that do.
pub(crate) type Apart = std::result::Result<Listed, (i64, i64)>;

/// The mistake if source pieces overlap, or a destination piece is not covered.
///
/// # Errors
/// [`Error::Memory`] if there is none to find out, [`Error::Interrupted`] if `poll` says so.
pub(crate) fn problem_of_cover(tensor: &Tensor, poll: Poll<'_>) -> Result<Option<String>> {
    let regions = tensor.sources.regions();
    let held: i128 = regions.iter().map(|region| i128::from(region.volume())).sum();
    let is_whole = !tensor.shape.contains(&0) && held == i128::from(tensor.shape[0]) * i128::from(tensor.strides[0]);
    if is_whole && regions.len() == 1 {
        return Ok(None); // most tensors
    }
    let listed = match listed(regions.iter(), regions.rank(), poll)? {
        Ok(listed) => listed,
        Err((a, b)) => return Ok(Some(format!("source pieces {a} and {b} overlap; of replicas, give one"))),
    };
    if is_whole {
        return Ok(None);
    }
    let mut finder = listed.finder();
    for (index, piece) in tensor.destinations.iter().enumerate() {
        if (index + 1) % PIECES_PER_POLL == 0 {
            poll().map_err(|_| Error::Interrupted)?;
        }
        let (needed, mut covered) = (piece.volume(), 0);
        if needed > 0 {
            let found = finder.under(piece.region, &mut |_, common| {
                covered += common.volume();
                Ok(())
            });
            found.map_err(no_room("the boxes under a piece"))?;
        }
        if covered != needed {
            let item = tensor.itemsize;
            return Ok(Some(format!(
                "destination piece {index} has {} elements, of which the source pieces hold {}",
                needed / item,
                covered / item
            )));
        }
    }
    Ok(None)
}

/// A shape of which no more is shown than a message has room for.
pub(crate) fn short(shape: &[i64]) -> String {
    if shape.len() <= 8 { format!("{shape:?}") } else { format!("{:?} … ({} dims)", &shape[..8], shape.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::{Pieces as Held, Wanted};
    use proptest::prelude::*;
    use shardwise_core::parallel::never;

    /// A tensor of elements of two bytes with these boxes, (start, stop) each, as source and destination pieces.
    fn tensor(shape: [i64; 2], sources: &[[i64; 4]], destinations: &[[i64; 4]]) -> Tensor {
        let pieces = |boxes: &[[i64; 4]]| {
            let rows: Vec<i64> = boxes.iter().flat_map(|b| [0, 0].into_iter().chain(*b).chain([0, 0])).collect();
            Held::with_bytes(&rows, 2, 2).unwrap()
        };
        let (shape, strides) = (vec![shape[0], shape[1], 2], vec![2 * shape[1], 2, 1]);
        let (sources, destinations) = (pieces(sources), pieces(destinations));
        Tensor { shape, strides, itemsize: 2, wanted: Wanted::default(), sources, destinations, first: 0 }
    }

    fn elements(b: &[i64; 4]) -> impl Iterator<Item = (i64, i64)> {
        let [top, left, bottom, right] = *b;
        (top..bottom).flat_map(move |row| (left..right).map(move |column| (row, column)))
    }

    proptest! {
        #[test]
        fn the_cover_is_that_of_the_elements_counted_one_by_one(
            sources in prop::collection::vec((0..6_i64, 0..6_i64, 0..4_i64, 0..4_i64), 0..7),
            destinations in prop::collection::vec((0..6_i64, 0..6_i64, 0..4_i64, 0..4_i64), 0..4),
            cut in prop::option::of((0..7_i64, 0..7_i64)),
        ) {
            let boxes = |all: &[(i64, i64, i64, i64)]| -> Vec<[i64; 4]> {
                all.iter().map(|&(y, x, h, w)| [y, x, (y + h).min(6), (x + w).min(6)]).collect()
            };
            let quarters = |(y, x)| vec![[0, 0, y, x], [0, x, y, 6], [y, 0, 6, x], [y, x, 6, 6]];
            let (sources, destinations) = (cut.map_or(boxes(&sources), quarters), boxes(&destinations));
            let held: Vec<(i64, i64)> = sources.iter().flat_map(elements).collect();
            let times = |at: &(i64, i64)| held.iter().filter(|&other| other == at).count();
            let problem = problem_of_cover(&tensor([6, 6], &sources, &destinations), &mut never).unwrap();
            if held.iter().any(|at| times(at) > 1) {
                prop_assert!(problem.unwrap().contains("overlap; of replicas, give one"));
            } else {
                let lacking = destinations.iter().position(|b| elements(b).any(|at| times(&at) == 0));
                let text = lacking.map(|index| {
                    let (all, there) = (elements(&destinations[index]), elements(&destinations[index]));
                    let there = there.filter(|at| times(at) == 1).count();
                    format!("destination piece {index} has {} elements, of which the source pieces hold {there}", all.count())
                });
                prop_assert_eq!(problem, text);
            }
        }
    }

    #[test]
    fn a_tensor_without_elements_needs_none() {
        // The other dims of it may be too many for 64 bits together.
        let huge = [0, 0, 1 << 62, 0];
        assert_eq!(problem_of_cover(&tensor([1 << 62, 0], &[huge], &[huge, huge]), &mut never).unwrap(), None);
    }

    #[test]
    fn it_can_be_interrupted() {
        let rows: Vec<_> = (0..40_000).map(|i| [2 * i, 0, 2 * i + 1, 1]).collect();
        let (tensor, mut calls) = (tensor([80_000, 1], &rows, &rows), 0);
        problem_of_cover(&tensor, &mut || {
            calls += 1;
            Ok(())
        })
        .unwrap();
        assert!(calls > 9);
        // Early, while the boxes are put in order, and late, while the destination's are looked up.
        for last in [1, calls - 1] {
            let mut asked = 0;
            let stopped = problem_of_cover(&tensor, &mut || {
                asked += 1;
                if asked > last { Err(CoreError::Interrupted) } else { Ok(()) }
            });
            assert!(matches!(stopped, Err(Error::Interrupted)));
        }
    }
}
