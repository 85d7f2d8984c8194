//! Plans between tilings of every kind.

use super::{super::*, cut};
use crate::{
    parallel::never,
    partition::Partition,
    plan::places::Places,
    region::{Region, Regions},
    tiling::{
        Piece, Pieces, Place,
        boxes::{Array, Boxes, one_each},
        grid::Grid,
        tests::{arrays, elements, seeds, shapes, tiling_of},
    },
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// What a plan between any two tilings must be, element by element: law 9.
fn check_any(source: &Arc<dyn Tiling>, destination: &Arc<dyn Tiling>, same: &[i64]) {
    let plan = Plan::new(source.clone(), destination.clone(), same.to_vec(), &mut never).unwrap();
    let (have, want) = (arrays(&**source), arrays(&**destination));
    let (from, to) = (source.pieces(&mut never).unwrap(), destination.pieces(&mut never).unwrap());
    let mut got: Vec<Vec<i64>> = want.iter().map(|array| vec![-1; array.len()]).collect();
    let zeros = vec![0; source.shape().len()];
    // Which element of the tensor is where, in a holder's array.
    let places = |tiling: &dyn Tiling, pieces: &Pieces, holder: i64, piece: i64| -> HashMap<i64, i64> {
        let position = pieces.position(holder, piece);
        assert!(pieces.of_holder(holder as usize).contains(&position));
        elements(tiling.shape(), &tiling.array_shape(holder).unwrap(), pieces.get(position, &zeros))
            .into_iter()
            .collect()
    };
    let mut last = -1;
    let mut count = [0, 0];
    let mut carry = |transfer: Transfer<'_>, stays: bool| {
        count[usize::from(stays)] += 1;
        assert_eq!(same[transfer.destination as usize] == transfer.source, stays);
        assert!(!transfer.region.is_empty());
        let local = places(&**source, &from, transfer.source, transfer.source_piece);
        let target = places(&**destination, &to, transfer.destination, transfer.destination_piece);
        let box_of = Piece { region: transfer.region, place: Place::At(&zeros) };
        for (offset, _) in elements(source.shape(), source.shape(), box_of) {
            let value = have[transfer.source as usize][local[&offset] as usize];
            let place = &mut got[transfer.destination as usize][target[&offset] as usize];
            assert_eq!((value, *place), (offset, -1), "{transfer:?}");
            *place = value;
        }
        if !stays {
            assert!(transfer.destination >= last);
            last = transfer.destination;
        }
        Ok(())
    };
    plan.visit_kept(0..want.len(), |transfer| carry(transfer, true)).unwrap();
    plan.visit_transfers(0..want.len(), &mut never, |transfer| carry(transfer, false)).unwrap();
    assert_eq!(got, want);
    assert_eq!(count, [plan.transfers(), plan.kept()]);
    // What a holder has itself it is not sent.
    for (holder, &twin) in same.iter().enumerate().filter(|(_, twin)| **twin >= 0) {
        let own: HashSet<i64> = have[twin as usize].iter().copied().collect();
        plan.visit_transfers(0..want.len(), &mut never, |transfer| {
            let all =
                elements(source.shape(), source.shape(), Piece { region: transfer.region, place: Place::At(&zeros) });
            assert!(transfer.destination != holder as i64 || all.iter().all(|(offset, _)| !own.contains(offset)));
            Ok(())
        })
        .unwrap();
    }
    super::turns::check(&plan);
    // The rows and the numbers of the pieces say the same, and so do the ranges one by one.
    let (rows, mut pieces) = (plan.transfer_rows(&mut never).unwrap(), vec![0; 2 * plan.transfers()]);
    plan.pieces_into(&mut pieces).unwrap();
    let mut number = 0;
    for range in plan.ranges(3) {
        plan.visit_transfers(range, &mut never, |transfer| {
            let mut expected = Transfer::of_row(&rows[number * plan.row()..(number + 1) * plan.row()]);
            (expected.source_piece, expected.destination_piece) = (pieces[2 * number], pieces[2 * number + 1]);
            assert_eq!(transfer, expected);
            number += 1;
            Ok(())
        })
        .unwrap();
    }
    assert_eq!(number, plan.transfers());
    // Seen in its piece's array, a box is as far from the piece's first element as it is in the tensor.
    for (end, pieces, tiling) in [(End::Source, &from, source), (End::Destination, &to, destination)] {
        let places = Places::new(&**tiling, &mut never).unwrap();
        for kept in [false, true] {
            let count = if kept { plan.kept() } else { plan.transfers() };
            let mut boxes = vec![-1; 2 * zeros.len() * count];
            let mut again = boxes.clone();
            plan.local_boxes_into(end, kept, Some(&places), &mut boxes, &mut never).unwrap();
            plan.local_boxes_into(end, kept, None, &mut again, &mut never).unwrap();
            assert_eq!(boxes, again);
            assert!(plan.local_boxes_into(end, kept, None, &mut [0], &mut never).is_err());
            let mut expected = Vec::new();
            let mut add = |transfer: Transfer<'_>| {
                let (holder, piece) = match end {
                    End::Source => (transfer.source, transfer.source_piece),
                    End::Destination => (transfer.destination, transfer.destination_piece),
                };
                let piece = pieces.get(pieces.position(holder, piece), &zeros);
                for (dim, (start, stop)) in transfer.region.sides().enumerate() {
                    let local = if let Place::At(at) = piece.place { at[dim] } else { 0 };
                    let shift = local - piece.region.start()[dim];
                    expected.extend([start + shift, stop + shift]);
                }
                Ok(())
            };
            let all = 0..want.len();
            if kept { plan.visit_kept(all, &mut add) } else { plan.visit_transfers(all, &mut never, &mut add) }
                .unwrap();
            assert_eq!(boxes, expected);
        }
    }
}

proptest! {
    #[test]
    fn any_two_tilings_keep_law_9(
        shape in shapes(),
        kinds in (0..6_usize, 0..6_usize),
        from in seeds(),
        to in seeds(),
        shift in 0..9_i64,
    ) {
        let (source, destination) = (tiling_of(&shape, kinds.0, &from), tiling_of(&shape, kinds.1, &to));
        let same: Vec<i64> =
            (0..destination.holders()).map(|d| if d + shift < source.holders() { d + shift } else { -1 }).collect();
        check_any(&source, &destination, &same);
    }

    #[test]
    fn boxes_that_are_a_grid_are_planned_as_any_boxes(
        shape in prop::collection::vec(1..8_i64, 0..4),
        chunks in prop::collection::vec(1..9_i64, 6),
        replicas: bool,
        shift in 0..9_i64,
        spoiled in (0..100_usize, 0..100_usize, -1..=1_i64),
    ) {
        let grid = |chunks: &[i64]| {
            let chunks: Vec<i64> = chunks.iter().zip(&shape).map(|(&chunk, &n)| chunk.min(n)).collect();
            Grid::new(&shape, &chunks, false).unwrap().pieces(&mut never).unwrap().regions().clone()
        };
        let bounds_of = |regions: &Regions| -> Vec<i64> {
            regions.iter().flat_map(Region::sides).flat_map(<[i64; 2]>::from).collect()
        };
        let known = |regions: &Regions| one_each(&shape, regions.len(), &bounds_of(regions), replicas).unwrap();
        // The same boxes holder by holder, of which none looks whether they are a grid.
        let any = |regions: &Regions| -> Arc<dyn Tiling> {
            let one = |region| {
                let mut own = Regions::new(shape.len());
                own.push(region).unwrap();
                (own, Array::Own)
            };
            Arc::new(Boxes::new(&shape, &regions.iter().map(one).collect::<Vec<_>>(), replicas, &mut never).unwrap())
        };
        let (from, to) = (grid(&chunks[..3]), grid(&chunks[3..]));
        let same: Vec<i64> =
            (0..to.len() as i64).map(|d| if d + shift < from.len() as i64 { d + shift } else { -1 }).collect();
        let made = |source: Arc<dyn Tiling>, destination: Arc<dyn Tiling>| {
            let plan = Plan::new(source, destination, same.clone(), &mut never).unwrap();
            let (mut pieces, mut kept) = (vec![-1; 2 * plan.transfers()], vec![-1; 2 * plan.kept()]);
            plan.pieces_into(&mut pieces).unwrap();
            plan.kept_pieces_into(&mut kept).unwrap();
            (plan.transfer_rows(&mut never).unwrap(), plan.kept_rows().unwrap(), pieces, kept)
        };
        prop_assert_eq!(known(&from).as_partition().is_some(), !shape.is_empty());
        prop_assert!(any(&from).as_partition().is_none());
        let expected = made(any(&from), any(&to));
        prop_assert_eq!(&made(known(&from), known(&to)), &expected);
        prop_assert_eq!(&made(known(&from), any(&to)), &expected);
        prop_assert_eq!(&made(any(&from), known(&to)), &expected);
        // With a number changed they are a grid no more, unless it is the only one of its dim.
        let (which, number, by) = spoiled;
        let mut rows = from.rows().to_vec();
        if !shape.is_empty() {
            let at = which % from.len() * 2 * shape.len() + number % (2 * shape.len());
            rows[at] += by;
        }
        let mut others = Regions::new(shape.len());
        (0..from.len()).for_each(|i| others.push(Region::of_row(&rows[i * 2 * shape.len()..][..2 * shape.len()])).unwrap());
        let as_grid =
            one_each(&shape, others.len(), &bounds_of(&others), replicas).map(|boxes| boxes.check(&mut never));
        if let Ok(checked) = as_grid {
            prop_assert_eq!(checked, any(&others).check(&mut never));
        } else {
            prop_assert!(others.iter().any(|b| b.sides().zip(&shape).any(|((a, z), &n)| a < 0 || a > z || z > n)));
        }
    }

    #[test]
    fn a_destination_may_ask_for_some_and_for_the_same(shape in shapes(), kind in 0..6_usize, from in seeds(), ask in seeds()) {
        let source = tiling_of(&shape, kind, &from);
        let mut asked = Regions::new(shape.len());
        for seeds in ask.chunks_exact(2) {
            let start: Vec<i64> = shape.iter().map(|&n| seeds[0] as i64 % (n + 1)).collect();
            let stop: Vec<i64> = start.iter().zip(&shape).map(|(at, n)| at + seeds[1] as i64 % (n - at + 1)).collect();
            asked.push(Region::new(&start, &stop)).unwrap();
        }
        let reader: Arc<dyn Tiling> = Arc::new(Boxes::one_each(&shape, asked, false).unwrap());
        check_any(&source, &reader, &vec![-1; reader.holders() as usize]);
    }

    #[test]
    fn what_the_source_lacks_is_named_and_nothing_else_is_asked_of_it(
        shape in prop::collection::vec(1..6_i64, 1..4), from in seeds(), pick in 0..100_usize,
    ) {
        let all = tiling_of(&shape, 3, &from).pieces(&mut never).unwrap();
        let victim = pick % all.len();
        let mut some = Regions::new(shape.len());
        all.regions().iter().enumerate().filter(|(i, _)| *i != victim).for_each(|(_, region)| some.push(region).unwrap());
        let source: Arc<dyn Tiling> = Arc::new(Boxes::one_each(&shape, some, false).unwrap());
        let lost = all.regions().get(victim);
        for region in all.regions().iter().chain([Region::new(&vec![0; shape.len()], &shape)]) {
            let mut one = Regions::new(shape.len());
            one.push(region).unwrap();
            let reader = Arc::new(Boxes::one_each(&shape, one, false).unwrap());
            let plan = Plan::new(source.clone(), reader, vec![-1], &mut never);
            match plan {
                Ok(_) => prop_assert!(!region.meets(lost)),
                Err(Error::NotHeld { holder: 0, start, stop }) => {
                    let gap = Region::new(&start, &stop);
                    prop_assert!(lost.contains(gap) && region.contains(gap) && !gap.is_empty());
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
}

#[test]
fn the_replicas_of_explicit_boxes_share_the_load() {
    // Two boxes, each with three holders, one of which holds both: six equal boxes are asked for.
    let regions = |rows: &[[i64; 2]]| {
        let mut regions = Regions::new(1);
        rows.iter().for_each(|row| regions.push(Region::of_row(row)).unwrap());
        regions
    };
    let holders = [vec![[0, 6]], vec![[0, 6], [6, 12]], vec![[6, 12]], vec![[0, 6]], vec![[6, 12]]];
    let holders: Vec<_> = holders.iter().map(|rows| (regions(rows), Array::Flat)).collect();
    let source = Arc::new(Boxes::new(&[12], &holders, true, &mut never).unwrap());
    let asked: Vec<[i64; 2]> = (0..6).map(|i| [2 * i, 2 * i + 2]).collect();
    let reader = Arc::new(Boxes::one_each(&[12], regions(&asked), false).unwrap());
    let plan = Plan::new(source, reader, vec![-1; 6], &mut never).unwrap();
    let senders: Vec<i64> = plan.transfer_rows(&mut never).unwrap().chunks(plan.row()).map(|row| row[0]).collect();
    // The first of those that have sent least, of whichever box.
    assert_eq!(senders, [0, 1, 3, 2, 4, 1]);
}

#[test]
fn sources_that_overlap_are_refused_and_a_poll_stops_every_plan() {
    let boxes =
        |bounds: &[i64]| Arc::new(Boxes::one_each(&[5], Regions::of_bounds(1, 2, bounds).unwrap(), false).unwrap());
    let twice = Plan::new(boxes(&[0, 3, 2, 4]), boxes(&[0, 1, 1, 2]), vec![-1, -1], &mut never).unwrap_err();
    assert_eq!(twice.to_string(), "holders[0] and holders[1] overlap: both hold [2:3]");
    let lacks = Plan::new(boxes(&[0, 3, 3, 4]), boxes(&[0, 3, 2, 5]), vec![-1, -1], &mut never).unwrap_err();
    assert_eq!(lacks.to_string(), "src does not hold [4:5], which holders[1] of dst needs");
    let (n, tall) = (1 << 16, |n: i64| cut(&[n], &[&["a"], &[]], &[1 << 16, 2]));
    let explicit = |p: &Arc<Partition>| -> Arc<dyn Tiling> {
        let boxes: Vec<i64> = (0..n).flat_map(|id| p.box_of(id).unwrap()).flat_map(<[i64; 2]>::from).collect();
        one_each(&[n, 2], n as usize, &boxes, false).unwrap()
    };
    let fine = tall(n);
    type Pair = (Arc<dyn Tiling>, Arc<dyn Tiling>);
    let pairs: [&dyn Fn() -> Pair; 3] =
        [&|| (fine.clone(), fine.clone()), &|| (explicit(&fine), fine.clone()), &|| (tall(1), explicit(&fine))];
    for pair in pairs {
        let mut polls = 0;
        let plan = |poll: Poll<'_>| {
            let (source, destination) = pair(); // anew: explicit boxes remember their index
            Plan::new(source, destination, vec![-1; n as usize], poll).map(drop)
        };
        let mut count = || {
            polls += 1;
            Ok(())
        };
        assert_eq!(plan(&mut count), Ok(()));
        assert!(polls > 3, "{polls}");
        // How many there are in all depends on the load: work in parallel polls while it waits.
        for stop in 1..=3 {
            let mut polls = 0;
            let mut poll = || {
                polls += 1;
                if polls == stop { Err(Error::Interrupted) } else { Ok(()) }
            };
            assert_eq!(plan(&mut poll), Err(Error::Interrupted));
        }
    }
}
