//! Tilings of every kind: each element is held and found once, and what is wrong is named.

use std::collections::HashSet;

use super::*;

proptest! {
    #[test]
    fn every_element_is_held_and_found(shape in shapes(), kind in 0..6_usize, seeds in seeds(), asked in seeds()) {
        let tiling = tiling_of(&shape, kind, &seeds);
        prop_assert_eq!(tiling.check(&mut never), Ok(()));
        prop_assert_eq!(tiling.pieces(&mut never), pieces_one_by_one(&*tiling, &mut never));
        let own = arrays(&*tiling);
        let (mut sizes, mut filled) = (vec![-1; own.len()], vec![-1; own.len()]);
        tiling.array_sizes_into(&mut sizes, &mut never).unwrap();
        tiling.held_sizes_into(&mut filled, &mut never).unwrap();
        for (array, (size, filled)) in own.iter().zip(sizes.into_iter().zip(filled)) {
            let there = array.iter().filter(|&&offset| offset >= 0).count();
            prop_assert_eq!((size, filled), (array.len() as i64, there as i64));
        }
        let held: HashSet<i64> = own.concat().into_iter().filter(|&offset| offset >= 0).collect();
        prop_assert_eq!(held.len() as i64, shape.iter().product::<i64>());
        // Some box, and what is found under it: each element once, in pieces of the holder that is said to hold it.
        let row: Vec<i64> = shape.iter().enumerate()
            .map(|(i, &n)| asked.get(i).map_or(0, |&seed| seed as i64 % (n + 1)))
            .chain(shape.iter().copied()).collect();
        let region = Region::of_row(&row);
        let tiles = tiling.tiles(&mut never).unwrap();
        let mut found = HashSet::new();
        let mut senders = tiles.senders().unwrap();
        if !region.is_empty() {
            tiles.finder().under(region, &mut |tile, common| {
                assert!(region.contains(common) && !common.is_empty());
                let sender = senders.next(tile, 0, common.volume())?;
                assert_eq!(tiles.held_by(tile, sender.holder), Some(sender));
                let pieces = tiling.pieces(&mut never)?;
                assert!(pieces.regions().get(pieces.position(sender.holder, sender.piece)).contains(common));
                for holder in 0..tiling.holders() {
                    if let Some(held) = tiles.held_by(tile, holder) {
                        assert!(pieces.regions().get(pieces.position(holder, held.piece)).contains(common));
                    }
                }
                let zeros = vec![0; shape.len()];
                for (offset, _) in elements(&shape, &shape, Piece { region: common, place: Place::At(&zeros) }) {
                    assert!(found.insert(offset), "found twice");
                }
                Ok(())
            }).unwrap();
        }
        prop_assert_eq!(found.len() as i64, region.volume());
    }

    #[test]
    fn tilings_pass_and_spoiled_ones_name_a_box(
        shape in prop::collection::vec(1..7_i64, 1..4),
        seeds in prop::collection::vec(0..1000_usize, 0..9),
        pick in 0..1000_usize,
        replicas: bool,
    ) {
        let all = cut_apart(&shape, &seeds);
        let check = |regions: Regions| Boxes::one_each(&shape, regions, replicas).unwrap().check(&mut never);
        prop_assert_eq!(check(all.clone()), Ok(()));
        let filled: Vec<usize> = (0..all.len()).filter(|&i| !all.get(i).is_empty()).collect();
        let victim = filled[pick % filled.len()];
        let mut without = Regions::new(shape.len());
        all.iter().enumerate().filter(|(i, _)| *i != victim).for_each(|(_, region)| without.push(region).unwrap());
        match check(without.clone()) {
            Err(Error::BoxMissing { start, stop }) => {
                let gap = Region::new(&start, &stop);
                prop_assert!(all.get(victim).contains(gap) && !gap.is_empty());
            }
            other => prop_assert!(false, "{other:?}"),
        }
        // Also where something else is missing: what is there twice is named first.
        for mut twice in [all.clone(), without] {
            let which = (0..twice.len()).find(|&i| !twice.get(i).is_empty());
            let Some(which) = which else { continue };
            let copy = twice.get(which).start().iter().chain(twice.get(which).stop()).copied().collect::<Vec<_>>();
            twice.push(Region::of_row(&copy)).unwrap();
            let (start, stop) = copy.split_at(shape.len());
            let overlap = Error::BoxesOverlap {
                first: which as i64, second: twice.len() as i64 - 1, start: start.to_vec(), stop: stop.to_vec(),
            };
            let checked = check(twice);
            prop_assert_eq!(checked == Err(overlap), !replicas);
        }
    }
}
