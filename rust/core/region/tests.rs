//! Tests of the algebra of boxes.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

fn elements(region: Region<'_>) -> HashSet<Vec<i64>> {
    region.sides().fold(HashSet::from([Vec::new()]), |all, (start, stop)| {
        all.iter().flat_map(|p| (start..stop).map(|i| [p.clone(), vec![i]].concat())).collect()
    })
}

fn row(sides: &[(i64, i64)]) -> Vec<i64> {
    let stops = sides.iter().map(|(start, length)| start + length);
    sides.iter().map(|side| side.0).chain(stops).collect()
}

proptest! {
    #[test]
    fn the_algebra_is_that_of_the_sets_of_elements(
        sides in (0..4_usize).prop_flat_map(|rank| prop::collection::vec(
            prop::collection::vec((0..5_i64, 0..4_i64), rank), 2)),
        origin in prop::collection::vec(0..3_i64, 3),
    ) {
        let rows: Vec<_> = sides.iter().map(|sides| row(sides)).collect();
        let (a, b) = (Region::of_row(&rows[0]), Region::of_row(&rows[1]));
        let (in_a, in_b) = (elements(a), elements(b));
        let common: HashSet<_> = in_a.intersection(&in_b).cloned().collect();
        prop_assert_eq!(a.elements().unwrap() as usize, in_a.len());
        prop_assert_eq!(a.is_empty(), in_a.is_empty());
        prop_assert_eq!(a.meets(b), !common.is_empty());
        let mut written = vec![0; rows[0].len()];
        prop_assert_eq!(a.overlap_into(b, &mut written), !common.is_empty());
        let shared = a.overlap(b);
        prop_assert_eq!(shared.is_some(), !common.is_empty());
        if let Some(shared) = shared {
            prop_assert_eq!(elements(Region::of_row(&written)), common.clone());
            prop_assert_eq!(elements(shared.region()), common);
        }
        let mut around = a.to_buf();
        prop_assert_eq!(around.region(), a);
        around.include(b);
        prop_assert!(around.region().contains(a) && around.region().contains(b));
        for dim in 0..a.rank() {
            let ends = (a.start()[dim].min(b.start()[dim]), a.stop()[dim].max(b.stop()[dim]));
            prop_assert_eq!(around.region().extent(dim), ends.1 - ends.0);
            let [low, high] = a.to_buf().split(dim, a.start()[dim] + a.extent(dim) / 2);
            let (low, high) = (elements(low.region()), elements(high.region()));
            prop_assert!(low.is_disjoint(&high));
            prop_assert_eq!(&low | &high, in_a.clone());
        }
        if !in_b.is_empty() {
            prop_assert_eq!(a.contains(b), in_b.is_subset(&in_a));
        }
        a.relative_into(&origin[..a.rank()], &mut written);
        let moved: HashSet<Vec<i64>> =
            in_a.iter().map(|p| p.iter().zip(&origin).map(|(at, from)| at - from).collect()).collect();
        prop_assert_eq!(elements(Region::of_row(&written)), moved);
    }

    #[test]
    fn a_range_is_cut_into_few_boxes_in_order(
        shape in prop::collection::vec(1..5_i64, 0..5),
        ends in (0..700_i64, 0..700_i64),
    ) {
        let size: i64 = shape.iter().product();
        let (start, stop) = (ends.0 % (size + 1), ends.1 % (size + 1));
        let strides = radix::strides(&shape);
        let (mut next, mut boxes) = (start, 0);
        boxes_of_range((start, stop), &shape, &mut |region, offset| {
            assert_eq!((offset, region.offset(&strides)), (next, next));
            // Its elements are one run of the tensor.
            let last: i64 = region.stop().iter().zip(&strides).map(|(stop, stride)| (stop - 1) * stride).sum();
            assert_eq!(last - offset + 1, region.elements()?);
            assert!(region.sides().zip(&shape).all(|((a, b), &n)| 0 <= a && a < b && b <= n));
            next += region.elements()?;
            boxes += 1;
            Ok(())
        })
        .unwrap();
        prop_assert_eq!(next, stop.max(start));
        prop_assert!(boxes <= (2 * shape.len()).saturating_sub(1).max(1), "{} boxes", boxes);
    }
}

#[test]
fn what_is_not_a_number_of_elements_is_an_error() {
    let huge = [0, 0, 1 << 32, 1 << 32];
    assert!(matches!(Region::of_row(&huge).elements(), Err(Error::Overflow { .. })));
    assert_eq!(Region::of_row(&[0, 3, 1 << 62, 3]).elements(), Ok(0));
    assert_eq!(Region::of_row(&[]).elements(), Ok(1));
    let rows = vec![7; 40];
    assert!(Region::of_row(&rows).text().ends_with(", 7:7, …]"));
}

#[test]
fn lists_of_boxes_count_those_without_dims() {
    let scalars = Regions::of_bounds(0, 3, &[]).unwrap();
    assert_eq!((scalars.len(), scalars.get(2).elements()), (3, Ok(1)));
    let boxes = Regions::of_bounds(2, 1, &[1, 3, 5, 9]).unwrap();
    assert_eq!(boxes.rows(), [1, 5, 3, 9]);
    let mut bounds = [0; 4];
    boxes.get(0).bounds_into(&[1, 2], &mut bounds);
    assert_eq!(bounds, [0, 2, 3, 7]);
    assert_eq!(sides(&bounds).collect::<Vec<_>>(), [(0, 2), (3, 7)]);
    assert!(Regions::of_bounds(2, 2, &[1, 3, 5, 9]).is_err());
    assert_eq!(boxes.get(0).contiguous_from(&[4, 9]), 1);
    assert_eq!(Region::of_row(&[1, 0, 3, 9]).contiguous_from(&[4, 9]), 0);
}
