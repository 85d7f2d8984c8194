//! Tests of the search for sequences of collectives: by hand here, of all layouts in `walked`.

mod walked;

use std::sync::Arc;

use super::{
    super::{
        cost::Tensor,
        kinds::{Kind, State, all_gather},
    },
    *,
};
use crate::{layout::Layout, mesh::Mesh, parallel::never, uneven::Uneven};

fn mesh(names: &[&str], sizes: &[i64]) -> Arc<Mesh> {
    Arc::new(Mesh::new(names, sizes).unwrap())
}

fn views(source: &Mesh, destination: &Mesh) -> std::result::Result<Views, Obstacle> {
    Views::new(source.into(), destination.into(), None)
}

fn partition(mesh: &Arc<Mesh>, specs: &[&[&str]], unreduced: &[&str], shape: &[i64]) -> Partition {
    Partition::new(Arc::new(Layout::new(mesh.clone(), specs, unreduced).unwrap()), shape, Uneven::Ceil).unwrap()
}

/// The sequence on links that are all the same.
fn found(source: &Partition, destination: &Partition, bandwidth: f64, latency: f64) -> Sequence {
    let views = views(source.mesh(), destination.mesh()).unwrap();
    let n = views.factors().len();
    let links = Links { bandwidth: vec![bandwidth; n], latency: vec![latency; n] };
    sequence(&views, source, destination, 4, &links, &mut never).unwrap().unwrap()
}

/// The kinds, with the bytes that each device receives.
fn kinds(source: &Partition, destination: &Partition) -> Vec<(Kind, i64)> {
    let steps = found(source, destination, 1e9, 1e-6).steps;
    steps.into_iter().map(|step| (step.collective.kind, step.bytes)).collect()
}

/// The bytes that each device receives, where only they matter.
fn fewest_bytes(source: &Partition, destination: &Partition) -> Vec<(Kind, i64)> {
    let steps = found(source, destination, 1e9, 0.0).steps;
    steps.into_iter().map(|step| (step.collective.kind, step.bytes)).collect()
}

#[test]
fn each_collective_is_found_where_it_is_all_that_is_needed() {
    // Bytes by hand: a tensor of 64 x 64 float32 is 16,384 bytes.
    let mesh = mesh(&["x", "y"], &[2, 4]);
    let of = |specs: [&[&str]; 2], unreduced: &[&str]| partition(&mesh, &specs, unreduced, &[64, 64]);
    let (rows, columns, whole) = (of([&["y"], &[]], &[]), of([&[], &["y"]], &[]), of([&[], &[]], &[]));
    assert_eq!(kinds(&whole, &rows), [(Kind::Slice, 0)]);
    assert_eq!(kinds(&rows, &whole), [(Kind::AllGather, 3 * 4096)]);
    assert_eq!(kinds(&rows, &columns), [(Kind::AllToAll, 3 * 1024)]);
    assert_eq!(kinds(&of([&["x", "y"], &[]], &[]), &of([&["y", "x"], &[]], &[])), [(Kind::Permute, 2048)]);
    assert_eq!(kinds(&rows, &rows), []);
}

#[test]
fn several_axes_are_exchanged_at_once() {
    // 64 x 64 float32 on eight devices is 2,048 bytes each, of which 7/8 go elsewhere.
    let mesh = mesh(&["node", "gpu"], &[2, 4]);
    let of = |specs: [&[&str]; 2]| partition(&mesh, &specs, &[], &[64, 64]);
    let (rows, columns) = (of([&["node", "gpu"], &[]]), of([&[], &["node", "gpu"]]));
    assert_eq!(kinds(&rows, &columns), [(Kind::AllToAll, 7 * 256)]);
    // In whichever order they stand in the end.
    assert_eq!(fewest_bytes(&rows, &of([&[], &["gpu", "node"]])), [(Kind::AllToAll, 7 * 256)]);
}

#[test]
fn axes_change_places_in_a_cycle_of_any_length() {
    let names = ["a", "b", "c", "d"];
    let mesh = mesh(&names, &[2; 4]);
    for length in 2..=4 {
        let of = |turn: usize| {
            let specs: Vec<Vec<&str>> = (0..length).map(|dim| vec![names[(dim + turn) % length]]).collect();
            let specs: Vec<&[&str]> = specs.iter().map(|spec| &spec[..]).collect();
            partition(&mesh, &specs, &[], &[4, 4, 4, 4][..length])
        };
        let shard = 4 * 2_i64.pow(length as u32);
        for turn in 1..length {
            assert_eq!(fewest_bytes(&of(0), &of(turn)), [(Kind::Permute, shard)], "{length} {turn}");
        }
    }
    // In the middle of a sequence: c replicates in the end, so the shards are moved before they are put together.
    let of = |specs: [&[&str]; 3]| partition(&mesh, &specs, &[], &[8, 8, 8]);
    let steps = fewest_bytes(&of([&["a"], &["b"], &["c"]]), &of([&["b"], &["c"], &[]]));
    assert_eq!(steps, [(Kind::Permute, 256), (Kind::AllGather, 256)]);
}

#[test]
fn a_part_of_an_axis_does_what_the_axis_cannot() {
    // (4, 2) shards of 512 bytes become (2, 4): half of the larger axis is exchanged, 256 bytes, and they change places.
    let mesh = mesh(&["x", "y"], &[4, 2]);
    let of = |specs: [&[&str]; 2]| partition(&mesh, &specs, &[], &[32, 32]);
    let (source, destination) = (of([&["x"], &["y"]]), of([&["y"], &["x"]]));
    let found = found(&source, &destination, 1e9, 0.0);
    assert_eq!(found.steps.iter().map(|step| step.bytes).sum::<i64>(), 256 + 512);
    assert_eq!(found.views.sizes(), [2, 2, 2]);
}

#[test]
fn it_matters_which_factors_of_an_axis_are_minor() {
    // (2, 6) shards of 1,152 bytes become (6, 2): two thirds are exchanged along the factor 3, whether the 2 or the 3 of
    // the six is its minor one, and then all change places.
    let mesh = mesh(&["x", "y"], &[6, 2]);
    let of = |specs: [&[&str]; 3]| partition(&mesh, &specs, &[], &[12, 12, 24]);
    let there = fewest_bytes(&of([&["y"], &["x"], &[]]), &of([&["x"], &["y"], &[]]));
    assert_eq!(there.iter().map(|(_, bytes)| bytes).sum::<i64>(), 768 + 1152);
}

#[test]
fn two_views_of_one_list_of_devices_have_collectives() {
    let (line, grid) = (mesh(&["world"], &[8]), mesh(&["dp", "tp"], &[2, 4]));
    let rows = partition(&line, &[&["world"], &[]], &[], &[64, 64]);
    let same = partition(&grid, &[&["dp", "tp"], &[]], &[], &[64, 64]);
    let columns = partition(&grid, &[&["dp"], &["tp"]], &[], &[64, 64]);
    assert_eq!(kinds(&rows, &same), []);
    // A shard has 2,048 bytes: three quarters of it are exchanged along tp.
    assert_eq!(kinds(&rows, &columns), [(Kind::AllToAll, 3 * 512)]);
    assert_eq!(kinds(&columns, &rows), [(Kind::AllToAll, 3 * 512)]);
}

#[test]
fn partial_sums_are_reduced_where_they_must_be() {
    let line = mesh(&["y"], &[4]);
    let of = |specs: [&[&str]; 2], unreduced: &[&str]| partition(&line, &specs, unreduced, &[64, 64]);
    let sums = of([&[], &[]], &["y"]);
    assert_eq!(kinds(&sums, &of([&["y"], &[]], &[])), [(Kind::ReduceScatter, 3 * 4096)]);
    assert_eq!(kinds(&sums, &of([&[], &[]], &[])), [(Kind::AllReduce, 6 * 4096)]);
    // Sums over two axes are one all-reduce: in a ring of 8, 2 * 7/8 of 16,384 bytes.
    let grid = mesh(&["x", "y"], &[2, 4]);
    let of = |specs: [&[&str]; 2], unreduced: &[&str]| partition(&grid, &specs, unreduced, &[64, 64]);
    assert_eq!(kinds(&of([&[], &[]], &["x", "y"]), &of([&[], &[]], &[])), [(Kind::AllReduce, 7 * 4096)]);
    // Replicas along x halve the work: each sums up one half, and they exchange the results.
    let found = kinds(&of([&[], &[]], &["y"]), &of([&["y"], &[]], &[]));
    assert_eq!(found, [(Kind::Slice, 0), (Kind::ReduceScatter, 3 * 2048), (Kind::AllGather, 2048)]);
}

#[test]
fn neighbours_of_one_kind_are_one_step() {
    let mesh = mesh(&["x", "y"], &[2, 4]);
    let of = |specs: [&[&str]; 1]| partition(&mesh, &specs, &[], &[64]);
    let steps = found(&of([&["x", "y"]]), &of([&[]]), 1e9, 1e-6).steps;
    assert_eq!(
        (steps.len(), steps[0].collective.kind, &steps[0].collective.axes[..]),
        (1, Kind::AllGather, &[0, 1][..])
    );
    assert_eq!(steps[0].bytes, 7 * 32);
}

#[test]
fn gathering_the_major_axis_goes_the_cheaper_way() {
    // ("x", "y") to ("y"): putting the axes in order and gathering moves 2 KiB + 2 KiB; gathering all, 14 KiB.
    let mesh = mesh(&["x", "y"], &[2, 4]);
    let of = |spec: &[&str]| partition(&mesh, &[spec], &[], &[4096]);
    assert_eq!(kinds(&of(&["x", "y"]), &of(&["y"])), [(Kind::Permute, 2048), (Kind::AllGather, 2048)]);
}

#[test]
fn what_has_no_sequence_has_a_reason() {
    let mesh = mesh(&["x"], &[4]);
    let of = |spec: &[&str]| partition(&mesh, &[spec], &[], &[6]);
    let expected = |side| Some(Obstacle::Indivisible { side, dim: 0, n: 6, k: 4 });
    assert_eq!(obstacle(&of(&["x"]), &of(&[])), expected("src"));
    assert_eq!(obstacle(&of(&[]), &of(&["x"])), expected("dst"));
    assert_eq!(obstacle(&of(&[]), &of(&[])), None);
    let sums = partition(&mesh, &[&[]], &["x"], &[6]);
    assert_eq!(obstacle(&sums, &of(&[])), None);
    assert_eq!(obstacle(&of(&[]), &sums), Some(Obstacle::UnreducedDestination));
}

#[test]
fn the_seconds_are_those_of_the_model() {
    // A second per message along x and three along y; 16 and 32 bytes a second. A tensor of 64 bytes.
    let links = Links { bandwidth: vec![16.0, 32.0], latency: vec![1.0, 3.0] };
    let mesh = mesh(&["x", "y"], &[2, 4]);
    let views = views(&mesh, &mesh).unwrap();
    let of = |spec: &[&str], unreduced: &[&str]| partition(&mesh, &[spec], unreduced, &[16]);
    let seconds = |source: &Partition, destination: &Partition| {
        let found = sequence(&views, source, destination, 4, &links, &mut never).unwrap().unwrap();
        found
            .steps
            .into_iter()
            .map(|step| (step.collective.kind, step.collective.axes, step.seconds))
            .collect::<Vec<_>>()
    };
    let whole = of(&[], &[]);
    assert_eq!(seconds(&whole, &of(&["y"], &[])), [(Kind::Slice, vec![1], 0.0)]);
    // Three messages, 48 bytes.
    assert_eq!(seconds(&of(&["y"], &[]), &whole), [(Kind::AllGather, vec![1], 9.0 + 1.5)]);
    // Six messages, twice 48 bytes.
    let sums = of(&["x"], &["y"]);
    assert_eq!(seconds(&sums, &of(&["x"], &[])), [(Kind::AllReduce, vec![1], 18.0 + 1.5)]);
    // One message along each, all 8 bytes over the slower link.
    let swapped = seconds(&of(&["x", "y"], &[]), &of(&["y", "x"], &[]));
    assert_eq!(swapped, [(Kind::Permute, vec![0, 1], 4.0 + 0.5)]);
}

#[test]
fn an_axis_in_parts_costs_what_it_costs_whole() {
    let (line, cube) = (mesh(&["x"], &[12]), mesh(&["a", "b", "c"], &[2, 3, 2]));
    let (whole, parts) = (views(&line, &line).unwrap(), views(&line, &cube).unwrap());
    let tensor = |views: &Views| {
        let n = views.factors().len();
        Tensor::new(views, &[144], 4, Links { bandwidth: vec![1e9; n], latency: vec![0.25; n] })
    };
    let (one, many) = (tensor(&whole), tensor(&parts));
    let cut = |spec: Vec<usize>| State { specs: vec![spec], unreduced: Vec::new() };
    let at_once = one.seconds(&cut(vec![0]), &all_gather(&cut(vec![0]), 0, 1));
    let mut before = cut(vec![0, 1, 2]);
    let together = many.seconds(&before, &all_gather(&before, 0, 3));
    let mut apart = 0.0;
    for _ in 0..3 {
        let step = all_gather(&before, 0, 1);
        apart += many.seconds(&before, &step);
        before = step.after;
    }
    let by_hand = 11.0 * 0.25 + 11.0 * 48.0 / 1e9;
    for seconds in [at_once, together, apart] {
        assert!((seconds - by_hand).abs() < 1e-12, "{seconds} {by_hand}");
    }
}

#[test]
fn neighbours_stay_apart_where_one_link_is_slow() {
    // Of 32 bytes each: once over the slow link x to change places, once more to gather x, and the rest over the fast
    // link y. Gathering x after y would take 128 bytes over x, and both at once all 224.
    let links = Links { bandwidth: vec![1e3, 1e9], latency: vec![0.0; 2] };
    let mesh = mesh(&["x", "y"], &[2, 4]);
    let views = views(&mesh, &mesh).unwrap();
    let of = |spec: &[&str]| partition(&mesh, &[spec], &[], &[64]);
    let found = sequence(&views, &of(&["x", "y"]), &of(&[]), 4, &links, &mut never).unwrap().unwrap();
    let seconds: f64 = found.steps.iter().map(|step| step.seconds).sum();
    assert!(seconds <= 0.064 + 3.0 * 64.0 / 1e9 + 1e-12, "{found:?}");
}

#[test]
fn axes_of_size_1_need_no_step_and_of_equal_costs_the_fewest_steps_win() {
    let mesh = mesh(&["x", "one", "y"], &[2, 1, 2]);
    type Specs<'a> = [&'a [&'a str]; 2];
    let of = |specs: Specs<'_>| partition(&mesh, &specs, &[], &[8, 8]);
    assert_eq!(kinds(&of([&["one"], &["x"]]), &of([&[], &["x"]])), []);
    // Where everything is free, a swap is one step, not two exchanges, and so is whatever one collective does.
    let pairs: [(Specs, Specs); 4] = [
        ([&["x"], &["y"]], [&["y"], &["x"]]),
        ([&["x", "y"], &[]], [&[], &["x", "y"]]),
        ([&["x", "y"], &[]], [&[], &["y", "x"]]),
        ([&["x"], &[]], [&[], &["y"]]),
    ];
    for ((a, b), steps) in pairs.into_iter().zip([1, 1, 1, 2]) {
        assert_eq!(found(&of(a), &of(b), f64::INFINITY, 0.0).steps.len(), steps, "{a:?} {b:?}");
    }
}

#[test]
fn the_kinds_have_the_names_that_people_use() {
    let names = ["slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"];
    assert_eq!(Kind::ALL.map(Kind::name), names);
}
