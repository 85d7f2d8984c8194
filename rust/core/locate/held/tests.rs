//! Offsets located among boxes, against a search box by box.

use super::*;
use crate::{parallel::never, radix::unravel};
use proptest::prelude::*;

/// A tensor of up to four dims, cut along each at some points; every second box of the grid, in an array as large.
fn held() -> impl Strategy<Value = (Vec<i64>, Vec<Side>)> {
    let dim = (1..6_i64, prop::collection::vec(0..6_i64, 0..3), any::<bool>());
    (prop::collection::vec(dim, 0..5), 1..3_usize, any::<bool>()).prop_map(|(dims, step, whole)| {
        let mut boxes: Vec<Vec<Side>> = vec![Vec::new()];
        for (size, cuts, is_cut) in &dims {
            let mut edges: Vec<i64> = cuts.iter().map(|cut| cut % size).chain([0, *size]).collect();
            edges.sort_unstable();
            if !is_cut || whole {
                edges = vec![0, *size];
            }
            boxes = boxes
                .iter()
                .flat_map(|one| {
                    edges.windows(2).map(move |pair| {
                        let side = Side { start: pair[0], stop: pair[1], at: pair[0] };
                        one.iter().copied().chain([side]).collect()
                    })
                })
                .collect();
        }
        let shape = dims.iter().map(|(size, ..)| *size).collect();
        (shape, boxes.into_iter().step_by(step).flatten().collect())
    })
}

proptest! {
    #[test]
    fn what_is_found_is_what_the_boxes_hold((shape, sides) in held(), more in 0..4_i64, seed in any::<u64>()) {
        // The holder's array has room before and after, in which the boxes are one place further along each dim.
        let own: Vec<i64> = shape.iter().map(|size| size + more).collect();
        // One side stands for the only element of a tensor without dims.
        let sides = if shape.is_empty() { vec![Side { start: 0, stop: 1, at: 0 }] } else { sides };
        let moved: Vec<Side> = sides.iter().map(|side| Side { at: side.at + more.min(1), ..*side }).collect();
        let one = Held::new(&shape, &own, &moved).unwrap();
        let size = product("shape", &shape).unwrap();
        let offsets: Vec<i64> = (0..size).map(|at| (at * 7 + (seed % 64) as i64) % size).collect();
        let (steps, mut expected) = (strides(&own), Vec::new());
        for (number, &offset) in offsets.iter().enumerate() {
            let index = unravel(offset, &shape);
            for sides in moved.chunks(shape.len().max(1)) {
                if sides.iter().zip(&index).all(|(side, at)| (side.start..side.stop).contains(at)) {
                    let places = sides.iter().zip(&index).zip(&steps);
                    let place: i64 = places.map(|((side, at), step)| (at - side.start + side.at) * step).sum();
                    expected.push((number as i64, place));
                }
            }
        }
        if shape.is_empty() {
            expected = vec![(0, 0)];
        }
        let narrow: Vec<i32> = offsets.iter().map(|&offset| offset as i32).collect();
        let count = one.count(&offsets, &mut never).unwrap();
        let (mut which, mut places) = (vec![0; count], vec![0; count]);
        one.locate_into(&narrow, &mut which, &mut places, &mut never).unwrap();
        prop_assert_eq!(which.into_iter().zip(places).collect::<Vec<_>>(), expected.clone());
        let room = product("own", &own).unwrap() as usize;
        let (mut array, mut dense) = (vec![-1; room], vec![-1; room]);
        for (number, place) in &expected {
            dense[*place as usize] = *number;
        }
        let values: Vec<i64> = (0..size).collect();
        prop_assert_eq!(one.scatter(&offsets, &values, &mut array, &mut never).unwrap(), expected.len());
        prop_assert_eq!(array, dense);
        prop_assert_eq!(one.first_outside(&offsets, &mut never).unwrap(), None);
        for bad in [-1, size, i64::MIN, i64::MAX] {
            let given: Vec<i64> = offsets.iter().copied().chain([bad, bad]).collect();
            prop_assert_eq!(one.first_outside(&given, &mut never).unwrap(), Some(offsets.len()));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let side = |start, stop, at| Side { start, stop, at };
    for (own, sides) in [
        (vec![4], vec![side(0, 5, 0)]),
        (vec![4], vec![side(3, 2, 0)]),
        (vec![4], vec![side(-1, 2, 0)]),
        (vec![4], vec![side(0, 4, 1)]),
        (vec![4], vec![side(0, 1, i64::MAX)]),
        (vec![4, 1], vec![side(0, 1, 0)]),
    ] {
        assert!(Held::new(&[4], &own, &sides).is_err(), "{own:?} {sides:?}");
    }
    assert!(Held::new(&[4, 4], &[4, 4], &[side(0, 1, 0)]).is_err());
    let one = Held::new(&[4], &[4], &[side(0, 4, 0)]).unwrap();
    assert!(one.scatter(&[0_i64], &[1_u8], &mut [0; 3], &mut never).is_err());
    assert!(one.scatter(&[0_i64], &[1_u8, 2], &mut [0; 4], &mut never).is_err());
    assert!(one.locate_into(&[0_i64], &mut [], &mut [], &mut never).is_err());
}
