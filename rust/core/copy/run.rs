//! A plan, run on arrays in memory: every box copied, on all cores.

use std::{
    ops::Range,
    sync::atomic::{AtomicI64, Ordering},
};

use crate::{
    copy::{
        blocks::{Copies, Group, Side},
        choices,
        contest::{Contest, Way},
        overlap::Disjoint,
        strided::Strided,
    },
    error::{Error, Result},
    parallel,
    plan::{
        Plan, Transfer,
        places::{Places, Window},
    },
    tiling::Poll,
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
    let parts = plan.ranges(choices::parts_of_plan(total, plan.transfers(), devices));
    run_parts(plan, &sides, regions, outputs, &Contest::new(way, total), (total, parts), poll)
}

/// [`run`], with the destination devices in parts: by one worker each, or if there is only one part, by all.
fn run_parts(
    plan: &Plan,
    sides: &Sides<'_>,
    regions: Disjoint<'_>,
    outputs: &[Option<usize>],
    contest: &Contest,
    (total, mut parts): (i64, Vec<Range<usize>>),
    poll: &mut dyn FnMut(i64, i64) -> Result<()>,
) -> Result<()> {
    let regions = sides.views(regions, &mut || poll(0, total))?;
    let collect = |devices| sides.collect(plan, regions, outputs, devices);
    let done = AtomicI64::new(0);
    let mut poll_done = || poll(done.load(Ordering::Relaxed), total);
    let elements = choices::elements(total);
    if parts.len() <= 1 {
        let mut copies = collect(parts.pop().unwrap_or_default())?;
        let groups = copies.arrange();
        let pieces = Pieces::new(total, &groups);
        parallel::for_each(elements, pieces, &mut poll_done, |piece| {
            done.fetch_add(copies.copy(std::iter::once(piece), contest), Ordering::Relaxed);
            Ok(())
        })?;
    } else {
        parallel::for_each(elements, parts.into_iter(), &mut poll_done, |devices| {
            let mut copies = collect(devices)?;
            let groups = copies.arrange();
            done.fetch_add(copies.copy(groups.iter().map(|group| (group, 0..group.turns)), contest), Ordering::Relaxed);
            Ok(())
        })?;
    }
    poll_done()
}

/// Both sides of a plan.
struct Sides<'p> {
    from: Holders<'p>,
    to: Holders<'p>,
}

impl<'p> Sides<'p> {
    fn new([from, to]: [&'p Places; 2], regions: Disjoint<'_>, outputs: &[Option<usize>]) -> Result<Self> {
        Ok(Self {
            from: Holders::new(from, regions.sources(), Some)?,
            to: Holders::new(to, regions.destinations(), |device| outputs[device])?,
        })
    }

    /// What the boxes are copied from and to: the arrays, or the parts of them that the pieces are seen in.
    fn views<'a>(&'a self, regions: Disjoint<'a>, poll: Poll<'_>) -> Result<Disjoint<'a>> {
        if self.from.views.is_empty() && self.to.views.is_empty() {
            return Ok(regions);
        }
        let of =
            |side: &'a Holders<'p>, arrays: &'a [Strided]| if side.views.is_empty() { arrays } else { &side.views };
        Disjoint::new(of(&self.from, regions.sources()), of(&self.to, regions.destinations()), poll)
    }

    /// The plan's boxes for some of the destination devices.
    fn collect<'a>(
        &self,
        plan: &Plan,
        regions: Disjoint<'a>,
        outputs: &[Option<usize>],
        devices: Range<usize>,
    ) -> Result<Copies<'a>> {
        // About: a transfer more or less makes the list grow.
        let share = plan.transfers().div_ceil(outputs.len().max(1)) * devices.len();
        let kept = plan.kept().div_ceil(outputs.len().max(1)) * devices.len();
        let mut copies = Copies::new(regions, share + kept)?;
        let mut sides = vec![Side::default(); plan.destination().shape().len()];
        let mut collect = |transfer: Transfer<'_>| {
            let Some(output) = outputs[transfer.destination as usize] else { return Ok(()) };
            if plan.addend_of(transfer.source) != 0 {
                return Ok(());
            }
            let (source, have) = self.from.piece(transfer.source, transfer.source_piece, transfer.source as usize);
            let (output, want) = self.to.piece(transfer.destination, transfer.destination_piece, output);
            for (((side, have), want), (start, stop)) in
                sides.iter_mut().zip(have).zip(want).zip(transfer.region.sides())
            {
                *side = Side { from: start - have, to: start - want, extent: stop - start };
            }
            copies.push(source, output, &sides)
        };
        plan.visit_kept(devices.clone(), &mut collect)?;
        plan.visit_transfers(devices, &mut parallel::never, collect)?;
        Ok(copies)
    }
}

/// Where the pieces of one side lie in the holders' arrays.
struct Holders<'p> {
    places: &'p Places,
    /// If an array is flat: what the pieces are seen in, which is a flat piece's part of the array, in its shape, or else
    /// the array itself.
    views: Vec<Strided>,
    /// The view of each piece.
    of_piece: Vec<usize>,
}

impl<'p> Holders<'p> {
    /// `array` says which of `arrays` a holder has, if any.
    fn new(places: &'p Places, arrays: &[Strided], array: impl Fn(usize) -> Option<usize>) -> Result<Self> {
        let (mut views, mut of_piece) = (Vec::new(), Vec::new());
        if places.has_flat() {
            let too_many = |_| Error::TooMany { what: "the views of flat arrays".to_owned() };
            of_piece.try_reserve_exact(places.pieces().len()).map_err(too_many)?;
            for holder in 0..places.pieces().holders() {
                let whole = array(holder).and_then(|at| arrays.get(at));
                let mut is_seen_whole = false;
                for piece in 0..places.pieces().of_holder(holder).len() {
                    let Some(whole) = whole else {
                        of_piece.push(usize::MAX);
                        continue;
                    };
                    let window = places.window(holder as i64, piece as i64);
                    if window != Window::Whole || !is_seen_whole {
                        views.try_reserve(1).map_err(too_many)?;
                        views.push(seen(whole, window)?);
                        is_seen_whole = window == Window::Whole;
                    }
                    of_piece.push(views.len() - 1);
                }
            }
        }
        Ok(Self { places, views, of_piece })
    }

    /// What a piece is seen in, and the position in the tensor of its position 0; `array` is the holder's.
    fn piece(&self, holder: i64, piece: i64, array: usize) -> (usize, &[i64]) {
        let view = match self.of_piece.is_empty() {
            true => array,
            false => self.of_piece[self.places.pieces().position(holder, piece)],
        };
        (view, self.places.origin(holder, piece))
    }

    /// The bytes of the pieces of the holders that have an array.
    fn bytes(&self, arrays: &[Option<usize>], itemsize: usize) -> i64 {
        let pieces = self.places.pieces();
        let held = arrays.iter().enumerate().filter(|(_, array)| array.is_some());
        let volumes = held.flat_map(|(holder, _)| pieces.of_holder(holder)).map(|at| pieces.regions().get(at).volume());
        volumes.fold(0_i64, i64::saturating_add).saturating_mul(itemsize as i64)
    }
}

/// An array as a piece of it is seen.
fn seen(whole: &Strided, window: Window<'_>) -> Result<Strided> {
    let Window::Flat { offset, piece } = window else { return Ok(whole.clone()) };
    let extents: Vec<i64> = piece.extents().collect();
    whole.shaped(offset, &extents).ok_or_else(|| Error::OutOfRange {
        what: "the end of a piece in a flat array",
        position: None,
        value: offset.saturating_add(piece.volume()),
        limit: whole.dims().first().map_or(0, |dim| dim.0).saturating_add(1),
    })
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
    use crate::{layout::Layout, mesh::Mesh, partition::Partition, uneven::Uneven};
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
            shape in (0..9_i64, 0..9_i64),
            specs in prop::collection::vec(prop::sample::subsequence(vec!["a", "b", "c"], 0..4), 2),
            swapped: bool,
            first_same in -1..4_i64,
            parts in 1..7_usize,
            streaming: bool,
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
            let mut got: Vec<Vec<u16>> = want.iter().map(|(values, _)| vec![u16::MAX; values.len()]).collect();
            let from: Vec<Strided> = have.iter().map(|(values, extents)| region(values.as_ptr(), extents)).collect();
            let to: Vec<Strided> =
                got.iter_mut().zip(&want).map(|(values, (_, extents))| region(values.as_mut_ptr(), extents)).collect();
            let regions = Disjoint::new(&from, &to, &mut parallel::never).unwrap();
            let total = to.iter().map(Strided::bytes).sum();
            let outputs: Vec<_> = (0..6).map(Some).collect();
            let places = places_of(&plan);
            let sides = Sides::new([&places[0], &places[1]], regions, &outputs).unwrap();
            let mut seen = (0, 0);
            let mut poll = |done, total| {
                seen = (done, total);
                Ok(())
            };
            let contest = Contest::new(streaming.then_some(Way::Streaming), total);
            run_parts(&plan, &sides, regions, &outputs, &contest, (total, plan.ranges(parts)), &mut poll).unwrap();
            prop_assert_eq!(seen, (total, total));
            for (got, (want, _)) in got.iter().zip(&want) {
                prop_assert_eq!(got, want);
            }
        }
    }

    #[test]
    fn many_short_transfers_are_copied() {
        // 512 rows of one device each to 512 columns: enough for the workers to find their own.
        let mesh = Arc::new(Mesh::new(&["x"], &[512]).unwrap());
        let cut = |specs: [&[&str]; 2]| {
            let layout = Arc::new(Layout::new(mesh.clone(), &specs, &[]).unwrap());
            Arc::new(Partition::new(layout, &[512, 512], Uneven::Even).unwrap())
        };
        let plan = Plan::new(cut([&["x"], &[]]), cut([&[], &["x"]]), vec![-1; 512], &mut parallel::never).unwrap();
        let mut columns: Vec<Vec<u16>> = vec![vec![0; 512]; 512];
        let rows: Vec<Vec<u16>> = (0..512).map(|i| (0..512).map(|j| i * 100 + j).collect()).collect();
        let from: Vec<Strided> = rows.iter().map(|row| region(row.as_ptr(), &[1, 512])).collect();
        let to: Vec<Strided> = columns.iter_mut().map(|column| region(column.as_mut_ptr(), &[512, 1])).collect();
        let outputs: Vec<_> = (0..512).map(Some).collect();
        let regions = Disjoint::new(&from, &to, &mut parallel::never).unwrap();
        let places = places_of(&plan);
        run(&plan, [&places[0], &places[1]], regions, &outputs, None, &mut |_, _| Ok(())).unwrap();
        for (j, column) in columns.iter().enumerate() {
            assert!(column.iter().enumerate().all(|(i, &value)| usize::from(value) == i * 100 + j));
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
