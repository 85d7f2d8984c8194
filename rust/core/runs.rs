//! The contiguous runs of a shard in the global array.

use multiversion::multiversion;

use crate::{
    error::{Error, Result},
    parallel::{self, Poll},
    partition::Partition,
    radix,
    region::Region,
    room,
};

/// The runs of one box: equally long, at offsets that an odometer over the outer dims gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs {
    /// Elements of each run.
    length: i64,
    /// The number of runs.
    count: i64,
    /// The offset of the first.
    first: i64,
    /// The dims that are stepped through, as (extent, stride), major first; no two of them could be one.
    outer: Vec<(i64, i64)>,
}

impl Runs {
    /// The runs of `device`'s box in the C-order global array, as few and as long as they can be.
    ///
    /// # Errors
    /// [`Error::DeviceIndex`] if the mesh has no such device.
    pub fn of(partition: &Partition, device: i64) -> Result<Self> {
        let (start, stop): (Vec<i64>, Vec<i64>) = partition.box_of(device)?.into_iter().unzip();
        let region = Region::new(&start, &stop);
        if region.is_empty() {
            return Ok(Self { length: 0, count: 0, first: 0, outer: Vec::new() });
        }
        let (shape, strides) = (partition.shape(), partition.strides());
        let inner = region.contiguous_from(shape);
        let mut outer: Vec<(i64, i64)> = Vec::with_capacity(inner);
        for (size, &stride) in region.extents().take(inner).zip(strides).filter(|&(size, _)| size > 1) {
            match outer.last_mut() {
                Some(last) if last.1 == size * stride => *last = (last.0 * size, stride),
                _ => outer.push((size, stride)),
            }
        }
        Ok(Self {
            length: region.extents().skip(inner).product(),
            count: outer.iter().map(|(size, _)| size).product(),
            first: region.offset(strides),
            outer,
        })
    }

    /// The number of runs.
    #[must_use]
    pub fn count(&self) -> i64 {
        self.count
    }

    /// The elements of each run.
    #[must_use]
    pub fn length(&self) -> i64 {
        self.length
    }

    /// Fills `out`, of (runs, 2) in C order, with offset and length of each run, in increasing order.
    ///
    /// # Errors
    /// [`Error::Length`] if `out` has not two slots per run; what `poll` returns.
    #[inline(never)]
    pub fn fill_into(&self, out: &mut [i64], poll: Poll<'_>) -> Result<()> {
        if usize::try_from(self.count).ok().and_then(|n| n.checked_mul(2)) != Some(out.len()) {
            let runs = usize::try_from(self.count).unwrap_or(usize::MAX).saturating_mul(2);
            return Err(Error::Length { left: "out", left_len: out.len(), right: "the runs", right_len: runs });
        }
        let runs_per_piece = parallel::PIECE / 2;
        let elements = out.len();
        let pieces = out.chunks_mut(2 * runs_per_piece).enumerate();
        parallel::for_each(elements, pieces, poll, |(number, piece)| {
            fill(self, (number * runs_per_piece) as i64, piece);
            Ok(())
        })
    }

    /// The runs as a list of (offset, length).
    ///
    /// # Errors
    /// [`Error::TooMany`] if there are too many to list.
    pub fn to_vec(&self) -> Result<Vec<(i64, i64)>> {
        let slots = usize::try_from(self.count).unwrap_or(usize::MAX).saturating_mul(2);
        let mut flat = room::filled(0, slots, format_args!("{} runs", self.count))?;
        self.fill_into(&mut flat, &mut parallel::never)?;
        Ok(flat.chunks_exact(2).map(|run| (run[0], run[1])).collect())
    }
}

/// Fills `out` with the runs from number `first` on.
///
/// Along the last dim the offsets are evenly spaced, so that a loop over it is compiled to instructions that write several
/// of them at once. Wrapping, for the same reason: each is an offset of the tensor.
#[multiversion(targets("x86_64+avx512f+avx512dq", "x86_64+avx2"))]
fn fill(runs: &Runs, first: i64, out: &mut [i64]) {
    let length = runs.length;
    let Some((&(inner, step), outer)) = runs.outer.split_last() else {
        out.chunks_exact_mut(2).for_each(|run| (run[0], run[1]) = (runs.first, length));
        return;
    };
    let sizes: Vec<i64> = outer.iter().map(|&(size, _)| size).collect();
    let mut digits = radix::unravel(first / inner, &sizes);
    let mut line: i64 = digits.iter().zip(outer).fold(runs.first, |sum, (digit, (_, stride))| sum + digit * stride);
    let mut at = first % inner;
    let mut rest = out;
    while !rest.is_empty() {
        let count = (inner - at).min(rest.len() as i64 / 2);
        let (part, others) = rest.split_at_mut(2 * count as usize);
        let mut offset = line.wrapping_add(at.wrapping_mul(step));
        for run in part.chunks_exact_mut(2) {
            (run[0], run[1]) = (offset, length);
            offset = offset.wrapping_add(step);
        }
        (rest, at) = (others, 0);
        for (digit, &(size, stride)) in digits.iter_mut().zip(outer).rev() {
            if *digit + 1 < size {
                *digit += 1;
                line += stride;
                break;
            }
            line -= *digit * stride;
            *digit = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{layout::Layout, locate::tests::partitions, mesh::Mesh, parallel::never, uneven::Uneven};
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        #[test]
        fn runs_are_the_longest_ranges_of_the_box(p in partitions()) {
            for device in 0..p.mesh().size() {
                let bounds = p.box_of(device).unwrap();
                let inside = |&offset: &i64| {
                    radix::unravel(offset, p.shape()).iter().zip(&bounds).all(|(at, &(from, to))| from <= *at && *at < to)
                };
                let mut by_hand: Vec<(i64, i64)> = Vec::new();
                for offset in (0..p.size()).filter(inside) {
                    match by_hand.last_mut() {
                        Some((start, length)) if *start + *length == offset => *length += 1,
                        _ => by_hand.push((offset, 1)),
                    }
                }
                let runs = Runs::of(&p, device).unwrap();
                prop_assert_eq!(runs.count(), by_hand.len() as i64);
                prop_assert!(by_hand.iter().all(|&(_, length)| length == runs.length()));
                prop_assert_eq!(runs.to_vec().unwrap(), by_hand);
            }
        }
    }

    /// The runs of `device`, on a mesh of 2 × 2 × 2 whose axes cut the dims in turn.
    fn runs(shape: [i64; 3], device: i64) -> Runs {
        let mesh = Arc::new(Mesh::new(&["a", "b", "c"], &[2, 2, 2]).unwrap());
        let layout = Arc::new(Layout::new(mesh, &[["a"], ["b"], ["c"]], &[]).unwrap());
        Runs::of(&Partition::new(layout, &shape, Uneven::Ceil).unwrap(), device).unwrap()
    }

    #[test]
    fn the_odometer_carries() {
        // Planes of 16, rows of 4: the last device begins at 2·16 + 2·4 + 2.
        assert_eq!(runs([4, 4, 4], 7).to_vec().unwrap(), [(42, 2), (46, 2), (58, 2), (62, 2)]);
        assert_eq!(runs([4, 6, 2], 0).to_vec().unwrap(), [(0, 1), (2, 1), (4, 1), (12, 1), (14, 1), (16, 1)]);
        assert_eq!(runs([3, 1, 4], 2), Runs { length: 0, count: 0, first: 0, outer: vec![] });
    }

    #[test]
    fn more_runs_than_a_piece_holds() {
        // 300 × 400 rows of 2, of which the second element is held: each row is a run.
        let runs = runs([600, 800, 2], 1);
        let by_hand: Vec<(i64, i64)> =
            (0..300).flat_map(|i| (0..400).map(move |j| (i * 1600 + j * 2 + 1, 1))).collect();
        assert!(by_hand.len() > parallel::PIECE);
        assert_eq!(runs.to_vec().unwrap(), by_hand);
    }

    #[test]
    fn an_array_of_another_length_is_refused() {
        let error = Error::Length { left: "out", left_len: 4, right: "the runs", right_len: 8 };
        assert_eq!(runs([4, 4, 4], 0).fill_into(&mut [0; 4], &mut never), Err(error));
        let mesh = Arc::new(Mesh::new(&["a"], &[2]).unwrap());
        let layout = Arc::new(Layout::new(mesh, &[["a"]], &[]).unwrap());
        let p = Partition::new(layout, &[4], Uneven::Even).unwrap();
        assert_eq!(Runs::of(&p, 2), Err(Error::DeviceIndex { index: 2, size: 2 }));
    }
}
