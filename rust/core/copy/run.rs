//! A plan, run on arrays in memory: every box copied, on all cores.

use std::{
    ops::Range,
    sync::atomic::{AtomicI64, Ordering},
};

use crate::{
    copy::{
        blocks::Group,
        choices,
        contest::{Contest, Way},
        overlap::Disjoint,
        sides::Sides,
        strided::Strided,
        strips::Strip,
    },
    error::{Error, Result},
    parallel::{self, Poll},
    plan::{Plan, places::Places},
};

/// Copies what each destination device receives and keeps into its array. `outputs[d]` is the destination among
/// `regions` that is device `d`'s, or none if it needs no copy. Of partial sums only the first addend is copied; the
/// others are the caller's to add.
///
/// `places` are those of the plan's source and of its destination, which the next run needs as well. `way` is how bytes
/// are stored; none for the way that turns out faster.
///
/// `poll` is called now and then with the bytes that are done, of the bytes in all.
///
/// # Errors
/// What `poll` returns; [`Error::Length`] or [`Error::OutOfRange`] if the arrays are not the plan's. The destinations may
/// then be partly written.
#[inline(never)]
pub fn run(
    plan: &Plan,
    places: [&Places; 2],
    regions: Disjoint<'_>,
    outputs: &[Option<usize>],
    way: Option<Way>,
    poll: &mut dyn FnMut(i64, i64) -> Result<()>,
) -> Result<()> {
    let devices = outputs.len();
    if devices as i64 != plan.destination().holders() {
        let size = plan.destination().holders() as usize;
        return Err(Error::Length { left: "out", left_len: devices, right: "holders", right_len: size });
    }
    // Each byte of a piece is written once.
    let sides = Sides::new(places, regions, outputs)?;
    let total = sides.to.bytes(outputs, regions.destinations().first().map_or(0, Strided::itemsize));
    let regions = sides.views(regions, &mut || poll(0, total))?;
    let shares = Shares::new(plan, &sides, regions, outputs, total)?;
    run_shares(plan, &sides, regions, outputs, &Contest::new(way, total), (total, shares), poll)
}

/// How the work is shared among workers.
enum Shares {
    /// The boxes of these devices are found first, and cut into pieces.
    Pieces(Range<usize>),
    /// The boxes of each part's devices are found and copied by one worker.
    Parts(Vec<Range<usize>>),
    /// The same, turn by turn: so many ranges of devices, the turns of each in so many parts.
    Strips { ranges: usize, parts: usize },
}

impl Shares {
    /// For work of `total` bytes.
    fn new(
        plan: &Plan,
        sides: &Sides<'_>,
        regions: Disjoint<'_>,
        outputs: &[Option<usize>],
        total: i64,
    ) -> Result<Self> {
        let mut parts = plan.ranges(choices::parts_of_plan(total, plan.transfers(), outputs.len()));
        if parts.len() <= 1 {
            return Ok(Self::Pieces(parts.pop().unwrap_or_default()));
        }
        // The first device stands for all.
        let copies = sides.collect(plan, regions, outputs, 0..1, &mut parallel::never)?;
        if !copies.have_wide_sources() && !copies.have_few_rows() {
            return Ok(Self::Parts(parts));
        }
        let (ranges, parts) = choices::strips(total, outputs.len());
        Ok(Self::Strips { ranges, parts })
    }
}

/// [`run`], with the work shared as it is said.
fn run_shares(
    plan: &Plan,
    sides: &Sides<'_>,
    regions: Disjoint<'_>,
    outputs: &[Option<usize>],
    contest: &Contest,
    (total, shares): (i64, Shares),
    poll: &mut dyn FnMut(i64, i64) -> Result<()>,
) -> Result<()> {
    let collect = |devices, poll: Poll<'_>| sides.collect(plan, regions, outputs, devices, poll);
    let done = AtomicI64::new(0);
    let add = |bytes| _ = done.fetch_add(bytes, Ordering::Relaxed);
    let mut poll_done = || poll(done.load(Ordering::Relaxed), total);
    let elements = choices::elements(total);
    match shares {
        Shares::Pieces(devices) => {
            let mut copies = collect(devices, &mut poll_done)?;
            let groups = copies.arrange()?;
            let pieces = Pieces::new(total, &groups);
            parallel::for_each(elements, pieces, &mut poll_done, |piece| {
                add(copies.copy(std::iter::once(piece), contest));
                Ok(())
            })?;
        }
        Shares::Parts(parts) => {
            parallel::for_each(elements, parts.into_iter(), &mut poll_done, |devices| {
                let mut copies = collect(devices, &mut parallel::never)?;
                let groups = copies.arrange()?;
                add(copies.copy(groups.iter().map(|group| (group, 0..group.turns)), contest));
                Ok(())
            })?;
        }
        Shares::Strips { ranges, parts } => {
            parallel::for_each(elements, Strip::all(plan, ranges, parts), &mut poll_done, |strip| {
                strip.copy(plan, sides, regions, outputs, contest, add)
            })?;
        }
    }
    poll_done()
}

/// The turns of all groups, cut into pieces.
struct Pieces<'a> {
    groups: std::slice::Iter<'a, Group>,
    /// About how many bytes make a piece.
    bytes: i64,
    /// The group at hand, its next turn, all its turns, and how many make a piece.
    current: Option<(&'a Group, i64, i64, i64)>,
}

impl<'a> Pieces<'a> {
    fn new(total: i64, groups: &'a [Group]) -> Self {
        Self { groups: groups.iter(), bytes: choices::piece(total), current: None }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = (&'a Group, std::ops::Range<i64>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((group, next, turns, step)) = &mut self.current
                && *next < *turns
            {
                let end = (*next + *step).min(*turns);
                let piece = (*group, *next..end);
                *next = end;
                return Some(piece);
            }
            let group = self.groups.next()?;
            let per_turn = group.bytes / group.turns.max(1);
            self.current = Some((group, 0, group.turns, (self.bytes / per_turn.max(1)).max(1)));
        }
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use crate::{copy::tuning::STREAMED_FROM, layout::Layout, mesh::Mesh, partition::Partition, uneven::Uneven};
    use proptest::prelude::*;
    use std::sync::Arc;

    /// The values of every device's box of a tensor of 0, 1, 2, …
    fn shards(partition: &Partition) -> Vec<(Vec<u16>, Vec<i64>)> {
        let columns = partition.shape()[1];
        (0..partition.mesh().size())
            .map(|device| {
                let sides = partition.box_of(device).unwrap();
                let (rows, within) = (sides[0].0..sides[0].1, sides[1].0..sides[1].1);
                let values = rows.flat_map(|i| within.clone().map(move |j| (i * columns + j) as u16)).collect();
                (values, sides.iter().map(|(start, stop)| stop - start).collect())
            })
            .collect()
    }

    fn region(values: *const u16, extents: &[i64]) -> Strided {
        let dims = vec![(extents[0], 2 * extents[1] as isize), (extents[1], 2)];
        // SAFETY: the values live as long as the test; the pointers to those of destinations are of mutable ones.
        unsafe { Strided::new(values.cast_mut().cast(), 2, dims) }
    }

    fn places_of(plan: &Plan) -> [Places; 2] {
        [plan.source(), plan.destination()].map(|tiling| Places::new(&**tiling, &mut parallel::never).unwrap())
    }

    proptest! {
        #[test]
        fn in_however_many_parts_every_device_gets_its_box(
            // The rows of the last ones are cut, in six as well.
            shape in prop_oneof![
                5 => (0..30_i64, 0..9_i64),
                5 => (0..30_i64, 190..400_i64),
                1 => (0..7_i64, 190_000..210_000_i64),
            ],
            asked in prop::collection::vec(prop::bool::weighted(0.8), 6),
            specs in prop::collection::vec(prop::sample::subsequence(vec!["a", "b", "c"], 0..4), 2),
            swapped: bool,
            first_same in -1..4_i64,
            parts in 1..7_usize,
            turns in prop::option::of(1..4_usize),
            streaming in prop::option::of(any::<bool>()),
            shift in 0..40_usize,
        ) {
            let mesh = Arc::new(Mesh::new(&["a", "b", "c"], &[2, 3, 1]).unwrap());
            let cut = |dim: usize, spec: &Vec<&'static str>| {
                let mut axes = vec![vec![]; 2];
                axes[dim].clone_from(spec);
                let layout = Arc::new(Layout::new(mesh.clone(), &axes, &[]).unwrap());
                Arc::new(Partition::new(layout, &[shape.0, shape.1], Uneven::Ceil).unwrap())
            };
            let (source, target) = (cut(usize::from(swapped), &specs[0]), cut(usize::from(!swapped), &specs[1]));
            let same = (0..6).map(|device| if first_same < 0 { -1 } else { (device + first_same) % 6 }).collect();
            let plan = Plan::new(source.clone(), target.clone(), same, &mut parallel::never).unwrap();
            let (have, want) = (shards(&source), shards(&target));
            // Each begins somewhere in its lines.
            let mut got: Vec<Vec<u16>> = want.iter().map(|(values, _)| vec![u16::MAX; shift + values.len()]).collect();
            let from: Vec<Strided> = have.iter().map(|(values, extents)| region(values.as_ptr(), extents)).collect();
            let to: Vec<Strided> = (got.iter_mut().zip(&want).zip(&asked).filter(|(_, asked)| **asked))
                .map(|((values, (_, extents)), _)| region(values[shift..].as_mut_ptr(), extents))
                .collect();
            let regions = Disjoint::new(&from, &to, &mut parallel::never).unwrap();
            let total = to.iter().map(Strided::bytes).sum();
            let mut numbers = 0..;
            let outputs: Vec<_> = asked.iter().map(|&asked| if asked { numbers.next() } else { None }).collect();
            let places = places_of(&plan);
            let sides = Sides::new([&places[0], &places[1]], regions, &outputs).unwrap();
            let mut seen = (0, 0);
            let mut poll = |done, total| {
                seen = (done, total);
                Ok(())
            };
            // In one way, or in both in turn.
            let ways = streaming.map(|is| if is { Way::Streaming } else { Way::Ordinary });
            let contest = Contest::new(ways, STREAMED_FROM);
            let mut ranges = plan.ranges(parts);
            let shares = match turns {
                _ if ranges.len() == 1 => Shares::Pieces(ranges.pop().unwrap()),
                None => Shares::Parts(ranges),
                Some(turns) => Shares::Strips { ranges: parts, parts: turns },
            };
            run_shares(&plan, &sides, regions, &outputs, &contest, (total, shares), &mut poll).unwrap();
            prop_assert_eq!(seen, (total, total));
            for ((got, (want, _)), asked) in got.iter().zip(&want).zip(asked) {
                prop_assert!(got[..shift].iter().all(|&value| value == u16::MAX));
                let is_right = if asked { got[shift..] == want[..] } else { got.iter().all(|&value| value == u16::MAX) };
                prop_assert!(is_right, "{:?}", want.len());
            }
        }
    }

    #[test]
    fn many_short_transfers_are_copied() {
        // 512 times nine rows to columns of 33, and back; then eight rows each: enough for the workers to find their own.
        const N: i64 = 512;
        let mesh = Arc::new(Mesh::new(&["x"], &[N]).unwrap());
        let cut = |specs: [&[&str]; 2], rows: i64| {
            let layout = Arc::new(Layout::new(mesh.clone(), &specs, &[]).unwrap());
            Arc::new(Partition::new(layout, &[rows * N, 33 * N], Uneven::Even).unwrap())
        };
        for (rows, swapped) in [(9, false), (9, true), (8, false), (8, true)] {
            let (mut source, mut target) = (cut([&["x"], &[]], rows), cut([&[], &["x"]], rows));
            if swapped {
                std::mem::swap(&mut source, &mut target);
            }
            let plan = Plan::new(source.clone(), target.clone(), vec![-1; 512], &mut parallel::never).unwrap();
            let (have, want) = (shards(&source), shards(&target));
            for way in [Way::Ordinary, Way::Streaming] {
                let mut got: Vec<Vec<u16>> = want.iter().map(|(values, _)| vec![0; values.len()]).collect();
                let from: Vec<_> = have.iter().map(|(values, extents)| region(values.as_ptr(), extents)).collect();
                let to: Vec<_> =
                    got.iter_mut().zip(&want).map(|(got, (_, extents))| region(got.as_mut_ptr(), extents)).collect();
                let outputs: Vec<_> = (0..512).map(Some).collect();
                let regions = Disjoint::new(&from, &to, &mut parallel::never).unwrap();
                let places = places_of(&plan);
                let sides = Sides::new([&places[0], &places[1]], regions, &outputs).unwrap();
                let shares = Shares::new(&plan, &sides, regions, &outputs, 2 * rows * 33 * N * N).unwrap();
                // A narrow source of many rows is read row by row, and its boxes are listed.
                assert_eq!(matches!(shares, Shares::Strips { .. }), rows == 8 || !swapped);
                run(&plan, [&places[0], &places[1]], regions, &outputs, Some(way), &mut |_, _| Ok(())).unwrap();
                assert!(got.iter().zip(&want).all(|(got, (want, _))| got == want), "{way:?}");
            }
        }
    }

    #[test]
    fn tensors_of_one_dim_and_of_three_are_copied_and_devices_without_an_output_left_out() {
        // Halves of one dim to three of its parts, of which the second is not asked for; each device has nothing yet.
        let mesh = |size| Arc::new(Mesh::new(&["x"], &[size]).unwrap());
        let cut = |size, specs: &[&[&str]], shape: &[i64]| {
            Arc::new(
                Partition::new(Arc::new(Layout::new(mesh(size), specs, &[]).unwrap()), shape, Uneven::Ceil).unwrap(),
            )
        };
        let flat = |values: *const u16, dims: Vec<(i64, isize)>| {
            // SAFETY: as in `region`.
            unsafe { Strided::new(values.cast_mut().cast(), 2, dims) }
        };
        for tail in [&[][..], &[2, 3]] {
            let inner: i64 = tail.iter().product();
            let shape = [&[10][..], tail].concat();
            let specs: Vec<&[&str]> =
                shape.iter().enumerate().map(|(dim, _)| if dim == 0 { &["x"][..] } else { &[] }).collect();
            let plan =
                Plan::new(cut(2, &specs, &shape), cut(3, &specs, &shape), vec![-1; 3], &mut parallel::never).unwrap();
            let dims = |rows: i64| -> Vec<(i64, isize)> {
                let strides = crate::radix::strides(&[&[rows][..], tail].concat());
                [&[rows][..], tail]
                    .concat()
                    .into_iter()
                    .zip(strides.iter().map(|&stride| 2 * stride as isize))
                    .collect()
            };
            let values: Vec<u16> = (0..(10 * inner) as u16).collect();
            let (low, high) = values.split_at((5 * inner) as usize);
            // Rows 0..4, 4..8 and 8..10.
            let (mut first, mut last) = (vec![u16::MAX; (4 * inner) as usize], vec![u16::MAX; (2 * inner) as usize]);
            let from = [flat(low.as_ptr(), dims(5)), flat(high.as_ptr(), dims(5))];
            let to = [flat(first.as_mut_ptr(), dims(4)), flat(last.as_mut_ptr(), dims(2))];
            let outputs = [Some(0), None, Some(1)];
            let regions = Disjoint::new(&from, &to, &mut parallel::never).unwrap();
            let places = places_of(&plan);
            let run_to = |outputs| run(&plan, [&places[0], &places[1]], regions, outputs, None, &mut |_, _| Ok(()));
            run_to(&outputs).unwrap();
            assert_eq!((&first[..], &last[..]), (&values[..first.len()], &values[(8 * inner) as usize..]));
            let short = run_to(&outputs[..2]);
            assert_eq!(short, Err(Error::Length { left: "out", left_len: 2, right: "holders", right_len: 3 }));
        }
    }
}
