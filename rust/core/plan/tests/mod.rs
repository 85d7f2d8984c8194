//! Tests of plans: what moves, by whom, in which rounds.

use super::{closed::DEVICES_PER_POLL, *};
use crate::{
    index::radix, layout::Layout, mesh::Mesh, parallel::never, partition::Partition, region::Regions,
    tiling::boxes::Boxes, uneven::Uneven,
};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

mod any;
mod turns;

/// All layouts of `rank` dims over the mesh's axes, each in every order; and with the last axis unreduced, if asked.
fn layouts(mesh: &Arc<Mesh>, rank: usize, unreduced: bool) -> Vec<Arc<Layout>> {
    let axes = mesh.names().len();
    let mut all = Vec::new();
    for code in 0..(rank + 1 + usize::from(unreduced)).pow(axes as u32) {
        for reversed in [false, true] {
            let (mut specs, mut sums, mut rest) = (vec![Vec::new(); rank], Vec::new(), code);
            for name in mesh.names() {
                match rest % (rank + 1 + usize::from(unreduced)) {
                    dim if dim < rank => specs[dim].push(name.as_str()),
                    dim if dim > rank => sums.push(name.as_str()),
                    _ => {}
                }
                rest /= rank + 1 + usize::from(unreduced);
            }
            if reversed {
                specs.iter_mut().for_each(|spec| spec.reverse());
            }
            all.push(Arc::new(Layout::new(mesh.clone(), &specs, &sums).unwrap()));
        }
    }
    all
}

fn elements(bounds: &[(i64, i64)]) -> Vec<Vec<i64>> {
    bounds.iter().fold(vec![Vec::new()], |all, &(start, stop)| {
        all.iter().flat_map(|p| (start..stop).map(|i| [p.clone(), vec![i]].concat())).collect()
    })
}

fn row_bounds(row: &[i64]) -> Vec<(i64, i64)> {
    let rank = row.len() / 2 - 1;
    (0..rank).map(|dim| (row[2 + dim], row[2 + rank + dim])).collect()
}

/// Rule 2.6, by looking at every element: each addend of each destination element arrives once, or is there already and
/// stays; senders hold what they send; no device sends to itself; there are as few boxes as there are shards to ask.
fn check(source: &Arc<Partition>, destination: &Arc<Partition>, same: &[i64]) {
    let plan = Plan::new(source.clone(), destination.clone(), same.to_vec(), &mut never).unwrap();
    let mut arrived: HashMap<(i64, i64, Vec<i64>), usize> = HashMap::new();
    let mut shards: HashSet<(i64, i64, i64)> = HashSet::new();
    for (rows, stays) in [(plan.transfer_rows(&mut never).unwrap(), false), (plan.kept_rows().unwrap(), true)] {
        for row in rows.chunks(plan.row()) {
            assert_eq!(same[row[1] as usize] == row[0], stays, "{row:?}");
            let held = source.box_of(row[0]).unwrap();
            let bounds = row_bounds(row);
            assert!(bounds.iter().zip(&held).all(|(b, h)| h.0 <= b.0 && b.0 < b.1 && b.1 <= h.1), "{row:?} {held:?}");
            let addend = plan.addend_of(row[0]);
            assert!(
                shards.insert((row[1], source.layout().shard_id(row[0]).unwrap(), addend)),
                "{row:?} could be merged"
            );
            for element in elements(&bounds) {
                *arrived.entry((row[1], addend, element)).or_default() += 1;
            }
        }
    }
    let mut wanted = 0;
    for device in 0..destination.mesh().size() {
        for element in elements(&destination.box_of(device).unwrap()) {
            for addend in 0..plan.addends() as i64 {
                wanted += 1;
                assert_eq!(arrived.get(&(device, addend, element.clone())), Some(&1), "{source:?} {destination:?}");
            }
        }
    }
    assert_eq!(wanted, arrived.len());
    check_kept(&plan, source, destination, same);
    turns::check(&plan);
    check_balance(&plan, source);
}

/// Whatever a destination device wants and holds already, stays.
fn check_kept(plan: &Plan, source: &Partition, destination: &Partition, same: &[i64]) {
    let mut kept: HashMap<i64, usize> = HashMap::new();
    for row in plan.kept_rows().unwrap().chunks(plan.row()) {
        kept.insert(row[1], elements(&row_bounds(row)).len());
    }
    for (device, &twin) in same.iter().enumerate().filter(|(_, twin)| **twin >= 0) {
        let held: HashSet<_> = elements(&source.box_of(twin).unwrap()).into_iter().collect();
        let common = elements(&destination.box_of(device as i64).unwrap()).iter().filter(|e| held.contains(*e)).count();
        assert_eq!(kept.get(&(device as i64)).copied().unwrap_or(0), common);
    }
}

/// The busiest replica of each shard sends at most `2 - 1/r` times the least possible, found by trying everything.
fn check_balance(plan: &Plan, source: &Partition) {
    let mut sizes: HashMap<(i64, i64), Vec<i64>> = HashMap::new();
    let mut sent: HashMap<(i64, i64), HashMap<i64, i64>> = HashMap::new();
    for row in plan.transfer_rows(&mut never).unwrap().chunks(plan.row()) {
        let group = (source.layout().shard_id(row[0]).unwrap(), plan.addend_of(row[0]));
        let volume = row_bounds(row).iter().map(|(a, b)| b - a).product();
        sizes.entry(group).or_default().push(volume);
        *sent.entry(group).or_default().entry(row[0]).or_default() += volume;
    }
    let replicas = source.layout().replicas() as usize / plan.addends();
    for (group, sizes) in sizes {
        let most = *sent[&group].values().max().unwrap();
        let (total, largest) = (sizes.iter().sum::<i64>(), *sizes.iter().max().unwrap());
        let r = replicas as i64;
        assert!(most * r <= total + (r - 1) * largest, "{sizes:?} on {r}: {most}");
        if sizes.iter().all(|&size| size == largest) {
            assert_eq!(most, radix::ceil_div(sizes.len() as i64, r) * largest);
        }
        if replicas.checked_pow(sizes.len() as u32).is_some_and(|ways| ways <= 4096) {
            assert!(most * r <= (2 * r - 1) * optimum(&sizes, replicas), "{sizes:?} on {r}: {most}");
        }
    }
}

fn optimum(sizes: &[i64], machines: usize) -> i64 {
    let all = (0..machines.pow(sizes.len() as u32)).map(|mut code| {
        let mut loads = vec![0; machines];
        for size in sizes {
            loads[code % machines] += size;
            code /= machines;
        }
        loads.into_iter().max().unwrap_or(0)
    });
    all.min().unwrap_or(0)
}

#[test]
fn every_pair_of_layouts_of_a_small_scope() {
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 3]).unwrap());
    let other = Arc::new(Mesh::new(&["a", "b"], &[2, 2]).unwrap());
    let rules = [(Uneven::Ceil, Uneven::Balanced), (Uneven::Chunk, Uneven::Ceil), (Uneven::Balanced, Uneven::Chunk)];
    for (from, to) in rules {
        for a in layouts(&mesh, 2, true) {
            let source = Arc::new(Partition::new(a, &[5, 4], from).unwrap());
            for b in layouts(&mesh, 2, false) {
                let destination = Arc::new(Partition::new(b, &[5, 4], to).unwrap());
                check(&source, &destination, &[0, 1, 2, 3, 4, 5]);
                check(&source, &destination, &[5, 3, -1, 0, 1, 2]);
            }
            for b in layouts(&other, 2, false) {
                let destination = Arc::new(Partition::new(b, &[5, 4], to).unwrap());
                check(&source, &destination, &[-1; 4]);
                check(&source, &destination, &[0, 1, 2, 3]);
            }
        }
    }
}

#[test]
fn rank_0_and_empty_tensors() {
    let mesh = Arc::new(Mesh::new(&["x"], &[3]).unwrap());
    let scalar = Arc::new(Partition::new(layouts(&mesh, 0, false)[0].clone(), &[], Uneven::Even).unwrap());
    check(&scalar, &scalar, &[0, 1, 2]);
    check(&scalar, &scalar, &[-1, 0, -1]);
    for layout in layouts(&mesh, 2, false) {
        let empty = Arc::new(Partition::new(layout, &[0, 3], Uneven::Ceil).unwrap());
        check(&empty, &empty, &[0, 1, 2]);
    }
}

#[test]
fn a_destination_of_partial_sums_is_refused() {
    let mesh = Arc::new(Mesh::new(&["x"], &[3]).unwrap());
    let layout = Arc::new(Layout::new(mesh, &[Vec::<&str>::new()], &["x"]).unwrap());
    let sums = Arc::new(Partition::new(layout, &[3], Uneven::Even).unwrap());
    let refused = Plan::new(sums.clone(), sums, vec![0, 1, 2], &mut never);
    assert_eq!(refused.unwrap_err(), Error::UnreducedDestination { axes: vec!["x".into()] });
}

#[test]
fn the_cost_does_not_depend_on_the_elements() {
    // 2^62 elements: nothing here is proportional to them.
    let mesh = Arc::new(Mesh::new(&["x"], &[4]).unwrap());
    let cut = |specs: [&[&str]; 2]| {
        let layout = Arc::new(Layout::new(mesh.clone(), &specs, &[]).unwrap());
        Arc::new(Partition::new(layout, &[1 << 31, 1 << 31], Uneven::Even).unwrap())
    };
    let plan = Plan::new(cut([&["x"], &[]]), cut([&[], &["x"]]), vec![0, 1, 2, 3], &mut never).unwrap();
    assert_eq!((plan.transfers(), plan.kept()), (12, 4));
}

fn any_partition(rank: usize) -> impl Strategy<Value = (Vec<i64>, Vec<usize>, bool, usize)> {
    let axes = prop::collection::vec(1..4_i64, 1..4);
    (axes, prop::collection::vec(0..=rank, 3), any::<bool>(), 0..3_usize)
}

fn build(shape: &[i64], (sizes, dims, reversed, rule): (Vec<i64>, Vec<usize>, bool, usize)) -> Arc<Partition> {
    let names: Vec<String> = (0..sizes.len()).map(|i| format!("a{i}")).collect();
    let mesh = Arc::new(Mesh::new(&names, &sizes).unwrap());
    let mut specs = vec![Vec::new(); shape.len()];
    for (name, &dim) in names.iter().zip(&dims) {
        if dim < shape.len() {
            specs[dim].push(name.as_str());
        }
    }
    if reversed {
        specs.iter_mut().for_each(|spec| spec.reverse());
    }
    let layout = Arc::new(Layout::new(mesh, &specs, &[]).unwrap());
    Arc::new(Partition::new(layout, shape, Uneven::ALL[1 + rule]).unwrap())
}

proptest! {
    #[test]
    fn random_pairs_keep_rule_2_6(
        shape in prop::collection::vec(0..6_i64, 3),
        a in any_partition(3),
        b in any_partition(3),
        shift in 0..9_i64,
    ) {
        let (source, destination) = (build(&shape, a), build(&shape, b));
        let size = source.mesh().size();
        let same: Vec<i64> = (0..destination.mesh().size()).map(|d| if d + shift < size { d + shift } else { -1 }).collect();
        check(&source, &destination, &same);
    }

    #[test]
    fn explicit_boxes_give_what_a_partition_gives(
        shape in prop::collection::vec(1..6_i64, 2),
        a in any_partition(2),
        b in any_partition(2),
    ) {
        let (source, destination) = (build(&shape, a), build(&shape, b));
        // One box per shard, in the order of the shards.
        let boxes: Vec<i64> = (0..source.layout().total_shards())
            .flat_map(|id| source.box_of_shard(id).unwrap()).flat_map(<[i64; 2]>::from).collect();
        let regions = Regions::of_bounds(2, boxes.len() / 4, &boxes).unwrap();
        let none = vec![-1; destination.mesh().size() as usize];
        let explicit = Arc::new(Boxes::one_each(&shape, regions, false).unwrap());
        let by_hand = Plan::new(explicit, destination.clone(), none.clone(), &mut never).unwrap();
        let planned = Plan::new(source.clone(), destination.clone(), none, &mut never).unwrap();
        let mut rows: Vec<Vec<i64>> = planned.transfer_rows(&mut never).unwrap().chunks(6).map(<[i64]>::to_vec).collect();
        rows.iter_mut().for_each(|row| row[0] = source.layout().shard_id(row[0]).unwrap());
        rows.sort_by_key(|row| (row[1], row[0]));
        prop_assert_eq!(by_hand.transfer_rows(&mut never).unwrap(), rows.concat());
    }
}

#[test]
fn what_memory_cannot_hold_is_an_error_and_what_it_need_not_hold_costs_nothing() {
    let partition = |sizes: &[i64], specs: &[&[&str]], shape: &[i64]| {
        let mesh = Arc::new(Mesh::new(&["x", "y"][..sizes.len()], sizes).unwrap());
        Arc::new(Partition::new(Arc::new(Layout::new(mesh, specs, &[]).unwrap()), shape, Uneven::Ceil).unwrap())
    };
    let too_many = |source, destination, same: &[i64]| {
        let refused = Plan::new(source, destination, same.to_vec(), &mut never).unwrap_err();
        assert!(matches!(refused, Error::TooMany { .. }), "{refused}");
    };
    let huge = 1 << 62;
    too_many(partition(&[huge], &[&["x"]], &[huge]), partition(&[1], &[&[]], &[huge]), &[-1]);
    too_many(partition(&[huge], &[&["x"]], &[3]), partition(&[1], &[&[]], &[3]), &[0]);
    let one_box = Boxes::one_each(&[huge], Regions::of_bounds(1, 1, &[0, huge]).unwrap(), false).unwrap();
    too_many(partition(&[huge], &[&["x"]], &[huge]), partition(&[1], &[&[]], &[huge]), &[-1]);
    let to_all = Plan::new(Arc::new(one_box), partition(&[huge], &[&["x"]], &[huge]), vec![], &mut never);
    assert!(matches!(to_all, Err(Error::Length { .. })));
    // Four shards, the replicas of each by the thousand million: only the four are looked at.
    let source = partition(&[4, 1 << 40], &[&["x"]], &[8]);
    let plan = Plan::new(source, partition(&[1], &[&[]], &[8]), vec![-1], &mut never).unwrap();
    let senders: Vec<i64> = plan.transfer_rows(&mut never).unwrap().chunks(plan.row()).map(|row| row[0]).collect();
    assert_eq!(senders, [0, 1 << 40, 2 << 40, 3 << 40]);
}

/// The partition of `shape` by `specs` on a mesh of axes "a", "b", … of `sizes`, under `"ceil"`.
fn cut(sizes: &[i64], specs: &[&[&str]], shape: &[i64]) -> Arc<Partition> {
    let names: Vec<String> = ('a'..).take(sizes.len()).map(String::from).collect();
    let mesh = Arc::new(Mesh::new(&names, sizes).unwrap());
    Arc::new(Partition::new(Arc::new(Layout::new(mesh, specs, &[]).unwrap()), shape, Uneven::Ceil).unwrap())
}

#[test]
fn the_replicas_of_each_shard_take_turns_whatever_was_asked_of_other_shards() {
    // Rows 0..3, 3..6, 6..9 and 9 of both columns, each element of the grid on two devices: 4·row + 2·column + replica.
    let source = cut(&[4, 2, 2], &[&["a"], &["b"]], &[10, 2]);
    // Rows 0..4 are asked of the rows 0 and 1 of the grid, 4..8 of 1 and 2, 8..10 of 2 and 3.
    let plan = Plan::new(source, cut(&[3], &[&["a"], &[]], &[10, 2]), vec![-1; 3], &mut never).unwrap();
    let senders: Vec<i64> = plan.transfer_rows(&mut never).unwrap().chunks(plan.row()).map(|row| row[0]).collect();
    assert_eq!(senders, [0, 2, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14]);
}

#[test]
fn devices_are_polled_for_and_a_poll_stops_the_plan() {
    let devices = 3 * DEVICES_PER_POLL;
    let plan = Plan::new(cut(&[1], &[&[]], &[1]), cut(&[devices as i64], &[&[]], &[1]), vec![-1; devices], &mut never)
        .unwrap();
    let mut rows = vec![0; plan.transfers() * plan.row()];
    let mut polls = 0;
    let mut poll = || {
        polls += 1;
        if polls < 6 { Ok(()) } else { Err(Error::Interrupted) }
    };
    assert_eq!(plan.transfers_into(&mut rows, &mut poll), Ok(()));
    assert_eq!(plan.transfers_into(&mut rows, &mut poll), Err(Error::Interrupted));
    assert_eq!(polls, 6);
}

#[test]
fn arrays_of_another_length_are_refused() {
    let plan = Plan::new(cut(&[2], &[&["a"]], &[4]), cut(&[1], &[&[]], &[4]), vec![0], &mut never).unwrap();
    assert_eq!((plan.transfers(), plan.kept(), plan.row()), (1, 1, 4));
    for len in [3, 5] {
        let refused = Error::Length { left: "out", left_len: len, right: "rows", right_len: 4 };
        assert_eq!(plan.transfers_into(&mut vec![0; len], &mut never), Err(refused.clone()));
        assert_eq!(plan.kept_into(&mut vec![0; len]), Err(refused));
    }
}

#[test]
fn transfers_are_counted_up_to_what_a_number_holds() {
    // Every element of a shard of its own, all of them for one device: as many transfers as elements, of 14 numbers.
    let count = |last: i64| {
        let sizes = [1024, 1024, 1024, 1024, 1024, last];
        let specs: [&[&str]; 6] = [&["a"], &["b"], &["c"], &["d"], &["e"], &["f"]];
        let whole: [&[&str]; 6] = [&[]; 6];
        Plan::new(cut(&sizes, &specs, &sizes), cut(&[1], &whole, &sizes), vec![-1], &mut never)
            .map(|plan| plan.transfers())
    };
    assert_eq!(count(1024), Ok(1 << 60));
    // 14 · 3 · 2^59 is over 2^64.
    assert!(matches!(count(1536), Err(Error::Overflow { .. })));
}
