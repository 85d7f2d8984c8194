//! Every reshard within a small scope: each element of each destination shard arrives exactly once, and nothing moves
//! that need not.
//!
//! Meshes of 1 or 2 axes of sizes 1 to 3, the source's and the destination's each any of them; every layout of rank 0 to
//! 2 on both sides; dims of 0 to 4; the rules "ceil", "chunk", "balanced" and "floor" on both sides ("even" is one of these where
//! it applies); devices that are all the same, in reverse order, or all others. That is some eight million plans, of
//! which the ordinary test makes every 97th, and the ignored one all, as in `exhaustive`.
//!
//! That the boxes of partitions are right is what `exhaustive` shows; here elements are counted one by one.

use shardwise_core::{
    layout::Layout,
    mesh::Mesh,
    parallel::never,
    partition::{Bounds, Partition},
    plan::Plan,
    uneven::Uneven,
};
use small_scope::{NAMES, Part, layouts, lists, sum_of};
use std::{collections::HashSet, sync::Arc};

mod small_scope;

const LARGEST_AXIS: i64 = 3;
const LARGEST_DIM: i64 = 4;
const MOST_AXES: usize = 2;
const MOST_DIMS: usize = 2;
const RULES: [Uneven; 4] = [Uneven::Ceil, Uneven::Chunk, Uneven::Balanced, Uneven::Floor];

/// The offsets of a box, in C order.
fn offsets_in(bounds: impl Iterator<Item = (i64, i64)>, shape: &[i64]) -> Vec<i64> {
    bounds.zip(shape).fold(vec![0], |offsets, ((start, stop), &n)| {
        offsets.iter().flat_map(|&offset| (start..stop).map(move |i| offset * n + i)).collect()
    })
}

/// A partition, and the elements that each device holds.
struct Side {
    partition: Arc<Partition>,
    held: Vec<Vec<i64>>,
}

impl Side {
    fn new(layout: &Arc<Layout>, shape: &[i64], rule: Uneven) -> Self {
        let partition = Arc::new(Partition::new(Arc::clone(layout), shape, rule).unwrap());
        let boxes = (0..layout.mesh().size()).map(|device| partition.box_of(device).unwrap());
        let held = boxes.map(|bounds: Bounds| offsets_in(bounds.into_iter(), shape)).collect();
        Self { partition, held }
    }
}

/// Every side for one shape.
fn sides(layouts: &[Arc<Layout>], shape: &[i64]) -> Vec<Side> {
    let of_rank = layouts.iter().filter(|layout| layout.rank() == shape.len());
    of_rank.flat_map(|layout| RULES.map(|rule| Side::new(layout, shape, rule))).collect()
}

/// One row of a plan as sender, receiver and the elements of its box.
fn read(row: &[i64], shape: &[i64]) -> (usize, usize, Vec<i64>) {
    let (start, stop) = row[2..].split_at(shape.len());
    let bounds = start.iter().copied().zip(stop.iter().copied());
    (row[0] as usize, row[1] as usize, offsets_in(bounds, shape))
}

/// One plan; `same` says which source device each destination device is.
fn check(source: &Side, destination: &Side, same: &[i64]) {
    let plan = Plan::new(source.partition.clone(), destination.partition.clone(), same.to_vec(), &mut never).unwrap();
    let shape = source.partition.shape();
    let context = || format!("{:?} to {:?}, same {same:?}", source.partition, destination.partition);
    let mut arrived = vec![vec![0; source.partition.size() as usize]; destination.held.len()];
    let mut pieces = vec![0; destination.held.len()];
    for row in plan.transfer_rows(&mut never).unwrap().chunks(plan.row()) {
        let (sender, receiver, offsets) = read(row, shape);
        assert!(same[receiver] != sender as i64, "a device sends to itself: {}", context());
        assert!(!offsets.is_empty(), "nothing is sent: {}", context());
        for offset in offsets {
            assert!(source.held[sender].contains(&offset), "the sender has not what it sends: {}", context());
            arrived[receiver][offset as usize] += 1;
        }
        pieces[receiver] += 1;
    }
    let shards: HashSet<&Vec<i64>> = source.held.iter().collect();
    let mut kept = 0;
    for (receiver, wanted) in destination.held.iter().enumerate() {
        let own: &[i64] = usize::try_from(same[receiver]).map_or(&[], |device| &source.held[device]);
        for offset in 0..source.partition.size() {
            let needed = wanted.contains(&offset) && !own.contains(&offset);
            assert_eq!(arrived[receiver][offset as usize], i32::from(needed), "{offset} at {receiver}: {}", context());
        }
        let missing = |shard: &Vec<i64>| wanted.iter().any(|o| shard.contains(o) && !own.contains(o));
        assert_eq!(pieces[receiver], shards.iter().filter(|shard| missing(shard)).count(), "{}", context());
        kept += wanted.iter().filter(|offset| own.contains(offset)).count();
    }
    let kept_rows = plan.kept_rows().unwrap();
    let kept_offsets: Vec<_> = kept_rows.chunks(plan.row()).map(|row| read(row, shape)).collect();
    assert_eq!(kept_offsets.iter().map(|(.., offsets)| offsets.len()).sum::<usize>(), kept, "{}", context());
    for (sender, receiver, offsets) in kept_offsets {
        assert_eq!(same[receiver], sender as i64);
        assert!(offsets.iter().all(|o| source.held[sender].contains(o) && destination.held[receiver].contains(o)));
    }
}

/// The destination's devices are the source's, the same in reverse order, or others.
fn devices(source: i64, destination: i64) -> [Vec<i64>; 3] {
    let forward: Vec<i64> = (0..destination).map(|i| if i < source { i } else { -1 }).collect();
    let backward = forward.iter().rev().copied().collect();
    [forward, backward, vec![-1; destination as usize]]
}

/// Every plan of one shape that `selected` takes by its turn; gives their number.
fn check_all_of(shape: &[i64], layouts: &[Arc<Layout>], selected: impl Fn(usize) -> bool) -> usize {
    let sides = sides(layouts, shape);
    let (mut count, mut turn) = (0, 0);
    for source in &sides {
        for destination in &sides {
            for same in devices(source.partition.mesh().size(), destination.partition.mesh().size()) {
                turn += 1;
                if selected(turn) {
                    check(source, destination, &same);
                    count += 1;
                }
            }
        }
    }
    count
}

/// Every shape; gives the number of plans.
fn check_all(part: Part, selected: impl Fn(usize) -> bool + Sync) -> usize {
    let mut all = Vec::new();
    for sizes in (1..=MOST_AXES).flat_map(|len| lists(len, 1, LARGEST_AXIS)) {
        let mesh = Arc::new(Mesh::new(&NAMES[..sizes.len()], &sizes).unwrap());
        for specs in (0..=MOST_DIMS).flat_map(|rank| layouts(sizes.len(), rank)) {
            let names: Vec<Vec<&str>> =
                specs.iter().map(|spec| spec.iter().map(|&axis| NAMES[axis]).collect()).collect();
            all.push(Arc::new(Layout::new(Arc::clone(&mesh), &names, &[]).unwrap()));
        }
    }
    let shapes: Vec<Vec<i64>> = (0..=MOST_DIMS).flat_map(|rank| lists(rank, 0, LARGEST_DIM)).collect();
    let count = sum_of(&shapes, part, |shape| check_all_of(shape, &all, &selected));
    println!("{} shapes, {} layouts, {count} cases", shapes.len(), all.len());
    count
}

#[test]
fn small_plans_move_each_element_once() {
    assert!(check_all(Part { which: 0, of: 1 }, |turn| turn % 97 == 0) > 80_000);
}

#[test]
#[ignore = "takes minutes"]
fn all_small_plans_move_each_element_once() {
    let part = Part::from_environment();
    assert!(check_all(part, |turn| part.has(turn)) > 8_000_000 / part.of);
}
