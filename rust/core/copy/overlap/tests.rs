use super::*;
use crate::parallel::never;
use proptest::prelude::*;
use std::collections::HashSet;

fn region(address: usize, itemsize: usize, dims: &[(i64, isize)]) -> Strided {
    // SAFETY: the region is never read or written, only its addresses are compared.
    unsafe { Strided::new(std::ptr::without_provenance_mut(address), itemsize, dims.to_vec()) }
}

fn bytes(region: &Strided) -> Vec<i128> {
    let mut all = vec![region.address() as i128];
    for &(extent, stride) in region.dims() {
        all = all.iter().flat_map(|at| (0..extent).map(move |i| at + i128::from(i) * stride as i128)).collect();
    }
    all.iter().flat_map(|at| (0..region.itemsize() as i128).map(move |i| at + i)).collect()
}

proptest! {
    #[test]
    fn sharing_is_what_comparing_all_bytes_says(
        dims in prop::collection::vec(prop::collection::vec((0..4_i64, -20..20_isize), 0..4), 2),
        sizes in prop::collection::vec(0..5_usize, 2),
    ) {
        for gap in 0..60 {
            let (a, b) = (region(1000, sizes[0], &dims[0]), region(1000 + gap, sizes[1], &dims[1]));
            let all_a: HashSet<_> = bytes(&a).into_iter().collect();
            prop_assert_eq!(share(&a, &b), bytes(&b).iter().any(|byte| all_a.contains(byte)));
            prop_assert_eq!(share(&b, &a), share(&a, &b));
            // Itself: never missed; refused needlessly only for strides that interleave.
            if all_a.len() != bytes(&a).len() {
                prop_assert!(overlaps_itself(&a));
            }
        }
    }
}

#[test]
fn a_region_overlaps_itself_where_a_stride_is_within_the_smaller_ones() {
    // Lines of three items of 8 bytes, 24 in all, and a dim of one position, which has no steps.
    for stride in (-60..60).filter(|&stride| stride != 0) {
        let lines = region(1000, 8, &[(2, stride), (1, 0), (3, -8)]);
        let distinct: HashSet<_> = bytes(&lines).into_iter().collect();
        assert_eq!(overlaps_itself(&lines), distinct.len() < 48, "{stride}");
    }
    // Nested in C order, however deep.
    assert!(!overlaps_itself(&region(1000, 2, &[(4, 60), (5, 12), (2, 6), (3, 2)])));
}

#[test]
fn items_the_same_distance_apart_interleave_or_share() {
    for (stride, size, other) in (1..9).flat_map(|stride| [(stride, 1, 2), (stride, 3, 1), (stride, 4, 4)]) {
        for gap in 0..40 {
            let (a, b) = (region(1000, size, &[(3, stride)]), region(1000 + gap, other, &[(2, -stride)]));
            let all = bytes(&a);
            assert_eq!(share(&a, &b), bytes(&b).iter().any(|byte| all.contains(byte)), "{stride} {gap}");
        }
    }
}

#[test]
fn column_views_of_one_array_are_apart() {
    let columns: Vec<Strided> = (0..4).map(|i| region(1000 + 8 * i, 8, &[(5, 32), (1, 8)])).collect();
    assert!(Disjoint::new(&[], &columns, &mut never).is_ok());
    assert!(Disjoint::new(&columns[..2], &columns[2..], &mut never).is_ok());
    let error = Disjoint::new(&columns[..2], &columns[1..], &mut never).unwrap_err();
    assert_eq!(error, Error::OverlapsOther { index: 0, other: "src_shards", position: 1 });
    let zero_stride = [region(1000, 8, &[(5, 0)])];
    assert_eq!(Disjoint::new(&[], &zero_stride, &mut never).unwrap_err(), Error::OverlapsItself { index: 0 });
    assert!(Disjoint::new(&zero_stride, &[], &mut never).is_ok());
}

/// The first pair that shares a byte and has a destination in it, by comparing all bytes.
fn by_bytes(sources: &[Strided], destinations: &[Strided]) -> bool {
    let sets =
        |arrays: &[Strided]| arrays.iter().map(|array| bytes(array).into_iter().collect()).collect::<Vec<HashSet<_>>>();
    let (sources, destinations) = (sets(sources), sets(destinations));
    destinations
        .iter()
        .enumerate()
        .any(|(i, written)| destinations[..i].iter().chain(&sources).any(|other| !written.is_disjoint(other)))
}

proptest! {
    #[test]
    fn views_of_one_array_are_told_apart_as_their_bytes_are(
        itemsize in 1..4_usize,
        views in prop::collection::vec((prop::collection::vec((0..6_i64, 0..6_i64, 1..3_i64, any::<bool>()), 3), any::<bool>()), 1..7),
        odd in prop::option::of((0..300_usize, prop::collection::vec((1..4_i64, -9..40_isize), 2), any::<bool>())),
    ) {
        // An array of 6 × 6 × 6 items with room between the lines; views with steps and reversed dims.
        let strides = [6 * 7 * itemsize as i64, 7 * itemsize as i64, itemsize as i64];
        let (mut sources, mut destinations) = (Vec::new(), Vec::new());
        for (sides, written) in views {
            let (mut address, mut dims) = (1000, Vec::new());
            for (&(start, length, step, reversed), stride) in sides.iter().zip(strides) {
                let extent = length.min((6 - start + step - 1) / step);
                let first = if reversed { start + step * (extent - 1).max(0) } else { start };
                address += first * stride;
                dims.push((extent, (step * if reversed { -stride } else { stride }) as isize));
            }
            let view = region(address as usize, itemsize, &dims);
            if written { &mut destinations } else { &mut sources }.push(view);
        }
        if let Some((at, dims, written)) = odd {
            let view = region(1000 + at, itemsize, &dims);
            if !written {
                sources.push(view);
            } else if !overlaps_itself(&view) {
                destinations.push(view);
            }
        }
        let found = Disjoint::new(&sources, &destinations, &mut never);
        prop_assert_eq!(found.is_err(), by_bytes(&sources, &destinations));
        if let Err(Error::OverlapsOther { index, other, position }) = found {
            let other = if other == "out" { &destinations } else { &sources };
            prop_assert!(share(&destinations[index], &other[position]));
        }
    }
}

#[test]
fn many_views_of_one_array_are_compared_as_boxes() {
    // 40,000 columns, then tiles of 200 × 200, of one array; and one that reaches into its neighbour.
    let columns: Vec<Strided> = (0..40_000).map(|i| region(1000 + 8 * i, 8, &[(500, 8 * 40_000), (1, 8)])).collect();
    assert!(Disjoint::new(&[], &columns, &mut never).is_ok());
    assert!(Disjoint::new(&columns[..9], &columns[9..], &mut never).is_ok());
    let tiles = |width: i64| -> Vec<Strided> {
        let tile = |i: usize| {
            region(1000 + (i / 200) * 5 * 8000 + (i % 200) * 40, 8, &[(5, 8000), (if i == 777 { width } else { 5 }, 8)])
        };
        (0..40_000).map(tile).collect()
    };
    assert!(Disjoint::new(&[], &tiles(5), &mut never).is_ok());
    let error = Disjoint::new(&[], &tiles(6), &mut never).unwrap_err();
    assert_eq!(error, Error::OverlapsOther { index: 778, other: "out", position: 777 });
}

#[test]
fn boxes_around_one_another_are_told_apart_although_no_line_parts_them() {
    // Four arms around a middle one, none of which can be cut off.
    let tile =
        |row: usize, column: usize, rows, columns| region(1000 + row * 80 + column * 8, 8, &[(rows, 80), (columns, 8)]);
    let wheel =
        |middle| [tile(0, 0, 2, 4), tile(0, 4, 4, 2), tile(4, 2, 2, 4), tile(2, 0, 4, 2), tile(2, 2, 2, middle)];
    assert!(Disjoint::new(&[], &wheel(2), &mut never).is_ok());
    let error = Disjoint::new(&[], &wheel(3), &mut never).unwrap_err();
    assert_eq!(error, Error::OverlapsOther { index: 4, other: "out", position: 1 });
}

#[test]
fn a_poll_ends_the_comparison() {
    let columns: Vec<Strided> = (0..20_000).map(|i| region(1000 + 8 * i, 8, &[(5, 8 * 20_000)])).collect();
    let mut left = 3;
    let mut poll = || {
        left -= 1;
        if left == 0 { Err(Error::Interrupted) } else { Ok(()) }
    };
    assert_eq!(Disjoint::new(&[], &columns, &mut poll).err(), Some(Error::Interrupted));
}
