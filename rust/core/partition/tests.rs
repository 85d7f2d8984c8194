//! Tests of partitions.

use super::*;
use crate::{locate::tests::partitions, parallel::never};
use proptest::prelude::*;

/// The number that `digits` spell where digit `i` counts to `sizes[i]`, first digit major.
fn spelt(digits: impl IntoIterator<Item = i64>, sizes: impl IntoIterator<Item = i64>) -> i64 {
    digits.into_iter().zip(sizes).fold(0, |number, (digit, size)| number * size + digit)
}

proptest! {
    #[test]
    fn every_answer_follows_from_the_coordinates(p in partitions()) {
        let (mesh, layout) = (p.mesh(), p.layout());
        let (mut boxes, mut shard_ids, mut replica_ids) = (Vec::new(), Vec::new(), Vec::new());
        for device in 0..mesh.size() {
            let coordinate = mesh.coordinate(device).unwrap();
            let along = |spec: &Vec<usize>| {
                spelt(spec.iter().map(|&axis| coordinate[axis]), spec.iter().map(|&axis| mesh.sizes()[axis]))
            };
            let index: Vec<i64> = layout.specs().iter().map(along).collect();
            let shard_id = spelt(index.iter().copied(), layout.num_shards().iter().copied());
            let replica_id = shard_ids.iter().filter(|&&id| id == shard_id).count() as i64;
            let bounds: Bounds = p.dims().iter().zip(&index).map(|(cut, &i)| cut.bounds(i)).collect();
            prop_assert_eq!(p.layout().shard_index(device).unwrap(), index);
            prop_assert_eq!(p.layout().shard_id(device).unwrap(), shard_id);
            prop_assert_eq!(p.layout().replica_id(device).unwrap(), replica_id);
            prop_assert_eq!(&p.box_of(device).unwrap(), &bounds);
            prop_assert_eq!(&p.box_of_shard(shard_id).unwrap(), &bounds);
            boxes.extend(bounds.into_iter().flat_map(|(start, stop)| [start, stop]));
            shard_ids.push(shard_id);
            replica_ids.push(replica_id);
        }
        for shard in 0..p.layout().total_shards() {
            let holders: Vec<i64> = (0..mesh.size()).filter(|&device| shard_ids[device as usize] == shard).collect();
            prop_assert_eq!(p.layout().replicas(), holders.len() as i64);
            prop_assert_eq!(p.layout().devices_holding(shard).unwrap(), holders);
        }
        let mut out = vec![-1; shard_ids.len()];
        p.layout().shard_ids_into(&mut out, &mut never).unwrap();
        prop_assert_eq!(&out, &shard_ids);
        p.layout().replica_ids_into(&mut out, &mut never).unwrap();
        prop_assert_eq!(out, replica_ids);
        let mut out = vec![-1; boxes.len()];
        p.boxes_into(&mut out, &mut never).unwrap();
        prop_assert_eq!(out, boxes);
    }
}

/// Device (a, b) of a mesh of 2 × 70,000 holds elements 2b and 2b + 1, all of the second dim, and is replica a.
fn over_many_devices() -> Partition {
    let mesh = Arc::new(Mesh::new(&["a", "b"], &[2, 70_000]).unwrap());
    let layout = Arc::new(Layout::new(mesh, &[&["b"][..], &[]], &[]).unwrap());
    Partition::new(layout, &[140_000, 3], Uneven::Even).unwrap()
}

#[test]
fn more_devices_than_a_piece_holds() {
    let p = over_many_devices();
    let mut ids = vec![-1; 140_000];
    p.layout().shard_ids_into(&mut ids, &mut never).unwrap();
    assert!(ids.iter().enumerate().all(|(device, &id)| id == device as i64 % 70_000));
    p.layout().replica_ids_into(&mut ids, &mut never).unwrap();
    assert!(ids.iter().enumerate().all(|(device, &id)| id == device as i64 / 70_000));
    let mut boxes = vec![-1; 140_000 * 4];
    p.boxes_into(&mut boxes, &mut never).unwrap();
    for (device, bounds) in boxes.chunks(4).enumerate() {
        let start = device as i64 % 70_000 * 2;
        assert_eq!(bounds, [start, start + 2, 0, 3]);
    }
}

#[test]
fn what_does_not_exist_is_named() {
    let p = over_many_devices();
    assert_eq!((p.size(), p.strides(), p.layout().replicas()), (420_000, &[3, 1][..], 2));
    for device in [-1, 140_000] {
        assert!(matches!(p.box_of(device), Err(Error::DeviceIndex { .. })));
        assert!(matches!(p.layout().shard_id(device), Err(Error::DeviceIndex { .. })));
        assert!(matches!(p.layout().replica_id(device), Err(Error::DeviceIndex { .. })));
    }
    for shard in [-1, 70_000] {
        let error = Error::OutOfRange { what: "shard_id", position: None, value: shard, limit: 70_000 };
        assert_eq!(p.box_of_shard(shard), Err(error.clone()));
        assert_eq!(p.layout().devices_holding(shard), Err(error));
    }
    let error =
        |left_len, right_len| Error::Length { left: "out", left_len, right: "the values of all devices", right_len };
    assert_eq!(p.layout().shard_ids_into(&mut [0; 3], &mut never), Err(error(3, 140_000)));
    assert_eq!(p.layout().replica_ids_into(&mut [0; 3], &mut never), Err(error(3, 140_000)));
    assert_eq!(p.boxes_into(&mut [0; 3], &mut never), Err(error(3, 560_000)));
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let layout = over_many_devices().layout().clone();
    let new = |shape: &[i64]| Partition::new(layout.clone(), shape, Uneven::Ceil);
    assert_eq!(new(&[1]), Err(Error::Rank { given: 1, rank: 2 }));
    assert_eq!(new(&[0, -1]), Err(Error::NegativeDim { dim: 1, size: -1 }));
    assert!(matches!(new(&[i64::MAX, 2]), Err(Error::Overflow { .. })));
    assert_eq!(new(&[i64::MAX, 0]).map(|p| p.size()), Ok(0));
}

#[test]
fn a_scalar_has_a_shard_and_no_bounds() {
    let layout = Layout::new(over_many_devices().layout().mesh().clone(), &[] as &[[&str; 0]], &[]).unwrap();
    let p = Partition::new(Arc::new(layout), &[], Uneven::Even).unwrap();
    assert_eq!((p.size(), p.layout().total_shards(), p.layout().replicas()), (1, 1, 140_000));
    assert_eq!(p.box_of(139_999), Ok(vec![]));
    assert_eq!(p.boxes_into(&mut [], &mut never), Ok(()));
}
