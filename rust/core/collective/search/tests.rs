//! Tests of the search for sequences of collectives.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use proptest::prelude::*;

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

/// What becomes of `before` in a step of this kind along these axes: the table in the documentation of `kinds`.
fn expected(before: &State, step: &Collective, sizes: &[i64]) -> State {
    let mut after = before.clone();
    // Several at once may be taken off a dim in any order.
    let take = |from: &mut Vec<usize>| {
        let left = from.len() - step.axes.len();
        let (mut taken, mut axes) = (from.split_off(left), step.axes.clone());
        taken.sort_unstable();
        axes.sort_unstable();
        assert_eq!(taken, axes);
    };
    match (step.kind, step.from_dim, step.to_dim) {
        (Kind::Slice, None, Some(to)) => {
            assert!(step.axes.iter().all(|&axis| place(before, axis).is_none()));
            after.specs[to].extend(&step.axes);
        }
        (Kind::AllGather, Some(from), None) => take(&mut after.specs[from]),
        (Kind::AllToAll, Some(from), Some(to)) => {
            take(&mut after.specs[from]);
            after.specs[to].extend(&step.axes);
        }
        (Kind::ReduceScatter | Kind::AllReduce, None, to) => {
            assert_eq!(to.is_some(), step.kind == Kind::ReduceScatter);
            assert!(step.axes.iter().all(|axis| before.unreduced.contains(axis)));
            after.unreduced.retain(|axis| !step.axes.contains(axis));
            to.into_iter().for_each(|to| after.specs[to].extend(&step.axes));
        }
        (Kind::Permute, None, None) => {
            let shards = |state: &State| -> Vec<i64> {
                state.specs.iter().map(|spec| spec.iter().map(|&axis| sizes[axis]).product()).collect()
            };
            assert_eq!(shards(before), shards(&step.after));
            assert_eq!(before.unreduced, step.after.unreduced);
            let moved = (0..sizes.len()).filter(|&axis| place(before, axis) != place(&step.after, axis));
            assert_eq!(step.axes, moved.collect::<Vec<_>>());
            after = step.after.clone();
        }
        other => panic!("{other:?}"),
    }
    after
}

/// The dim that an axis cuts and its place there, or past the dims if it is unreduced.
fn place(state: &State, axis: usize) -> Option<(usize, usize)> {
    let all = state.specs.iter().chain([&state.unreduced]).enumerate();
    all.flat_map(|(dim, spec)| spec.iter().enumerate().map(move |(i, &a)| (a, (dim, i))))
        .find(|&(a, (dim, _))| a == axis && dim <= state.specs.len())
        .map(|(_, (dim, i))| if dim == state.specs.len() { (dim, 0) } else { (dim, i) })
}

/// The states of a partition's layout on common sub-axes.
fn state(of: (Vec<Vec<usize>>, Vec<usize>)) -> State {
    State { specs: of.0, unreduced: of.1 }
}

/// Carries out a sequence state by state; gives the kinds that it has.
fn check(source: &Partition, destination: &Partition, found: &Sequence) -> HashSet<Kind> {
    let Sequence { views, steps } = found;
    let (sizes, shape) = (views.sizes(), source.shape());
    let mut now = state(views.of_source(source.layout()));
    for step in steps {
        now = expected(&now, &step.collective, &sizes);
        assert_eq!(now, step.collective.after, "{step:?}");
        for (n, spec) in shape.iter().zip(&now.specs) {
            assert_eq!(n % spec.iter().map(|&axis| sizes[axis]).product::<i64>(), 0);
        }
    }
    assert_eq!(now, state(views.of_destination(destination.layout())));
    steps.iter().map(|step| step.collective.kind).collect()
}

/// Some layouts of two dims on `names`: each axis cuts one of the dims, or none, or is unreduced; in both orders.
fn layouts<'a>(names: &[&'a str], roles: usize) -> Vec<Vec<Vec<&'a str>>> {
    let all = 0..2 * roles.pow(names.len() as u32);
    all.map(|code| {
        let (mut all, mut rest) = (vec![vec![]; 4], code / 2);
        for &name in names {
            all[rest % roles].push(name);
            rest /= roles;
        }
        all.iter_mut().filter(|_| code % 2 == 1).for_each(|spec| spec.reverse());
        all
    })
    .collect()
}

fn of_lists(mesh: &Arc<Mesh>, all: &[Vec<&str>], shape: &[i64]) -> Partition {
    let layout = Layout::new(mesh.clone(), &all[..2], &all[3]).unwrap();
    Partition::new(Arc::new(layout), shape, Uneven::Ceil).unwrap()
}

#[test]
fn every_step_does_what_its_kind_says() {
    let names = ["x", "y", "z"];
    let mesh = mesh(&names, &[2, 4, 2]);
    let mut seen = HashSet::new();
    let (sources, destinations) = (layouts(&names, 4), layouts(&names, 3));
    let pairs = sources.iter().flat_map(|a| destinations.iter().map(move |b| (a, b)));
    for (a, b) in pairs.step_by(23) {
        let (source, destination) = (of_lists(&mesh, a, &[8, 4]), of_lists(&mesh, b, &[8, 4]));
        if obstacle(&source, &destination).is_some() {
            continue;
        }
        seen.extend(check(&source, &destination, &found(&source, &destination, 1e9, 1e-6)));
        let views = views(&mesh, &mesh).unwrap();
        let links = Links { bandwidth: vec![1e9; 3], latency: vec![1e-6; 3] };
        let change = Change::new(&views, &source, &destination, 4, links);
        let always = change.finished(change.by_way_of_replication(), &source, &destination);
        seen.extend(check(&source, &destination, &always));
    }
    assert_eq!(seen.len(), Kind::ALL.len(), "{seen:?}");
}

/// All layouts of `factors` factors on `dims` dims.
fn all_states(factors: usize, dims: usize) -> Vec<State> {
    let mut states = vec![State { specs: vec![Vec::new(); dims], unreduced: Vec::new() }];
    for factor in 0..factors {
        let mut more = Vec::new();
        for state in &states {
            for dim in 0..dims {
                for place in 0..=state.specs[dim].len() {
                    let mut with = state.clone();
                    with.specs[dim].insert(place, factor);
                    more.push(with);
                }
            }
        }
        states.extend(more);
    }
    states
}

/// The least seconds from a layout to each other one with at most one permute: relaxed until nothing changes, over every
/// pair of layouts that one collective leads between.
fn exhaustive(tensor: &Tensor, states: &[State], start: usize) -> Vec<f64> {
    let count = tensor.sizes.len();
    let edge = |a: &State, b: &State| -> Option<(bool, f64)> {
        let (old, new) = (a.roles(count), b.roles(count));
        let moved: Vec<usize> = (0..count).filter(|&factor| old[factor] != new[factor]).collect();
        let dims = |state: &State| {
            let mut of: Vec<Option<usize>> = vec![None; moved.len()];
            for (dim, spec) in state.specs.iter().enumerate() {
                for (i, factor) in moved.iter().enumerate() {
                    if spec.contains(factor) {
                        of[i] = Some(dim);
                    }
                }
            }
            of.dedup();
            of
        };
        let minor = |state: &State| {
            let of = dims(state)[0];
            of.is_none_or(|dim| state.specs[dim].iter().rev().take(moved.len()).all(|factor| moved.contains(factor)))
        };
        let step =
            |kind, from_dim, to_dim| Collective { kind, axes: moved.clone(), from_dim, to_dim, after: b.clone() };
        let seconds = |kind| tensor.seconds(a, &step(kind, None, None));
        let mut ways = Vec::new();
        if dims(a).len() == 1 && dims(b).len() == 1 && minor(a) && minor(b) && dims(a) != dims(b) {
            let kind = match (dims(a)[0], dims(b)[0]) {
                (None, _) => Kind::Slice,
                (_, None) => Kind::AllGather,
                _ => Kind::AllToAll,
            };
            ways.push((false, seconds(kind)));
        }
        if tensor.shards(a) == tensor.shards(b) {
            ways.push((true, seconds(Kind::Permute)));
        }
        ways.into_iter().min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let usable = |state: &State| tensor.divides(state);
    let edges: Vec<(usize, usize, bool, f64)> = (0..states.len())
        .flat_map(|i| (0..states.len()).map(move |j| (i, j)))
        .filter(|&(i, j)| i != j && usable(&states[i]) && usable(&states[j]))
        .filter_map(|(i, j)| edge(&states[i], &states[j]).map(|(permute, seconds)| (i, j, permute, seconds)))
        .collect();
    let mut least = vec![[f64::INFINITY; 2]; states.len()];
    least[start] = [0.0; 2];
    loop {
        let mut changed = false;
        for &(i, j, permute, seconds) in &edges {
            let (without, with) = (least[i][0], least[i][1]);
            let (to_without, to_with) =
                if permute { (f64::INFINITY, without + seconds) } else { (without + seconds, with + seconds) };
            for (place, better) in [(0, to_without), (1, to_with), (1, to_without)] {
                if better < least[j][place] * (1.0 - 1e-12) {
                    least[j][place] = better;
                    changed = true;
                }
            }
        }
        if !changed {
            return least.into_iter().map(|both| both[1]).collect();
        }
    }
}

#[test]
fn the_sequence_is_the_cheapest_of_all() {
    // Of factors that are primes, so that there is nothing finer; links alike, and not.
    let cases: [(&[i64], &[i64]); 3] = [(&[2, 2, 2], &[8, 8]), (&[2, 3], &[6, 6]), (&[2, 2], &[4, 2, 3])];
    for (sizes, shape) in cases {
        let names = &["x", "y", "z"][..sizes.len()];
        let mesh = mesh(names, sizes);
        let views = views(&mesh, &mesh).unwrap();
        let states = all_states(sizes.len(), shape.len());
        for (bandwidth, latency) in [([1e9; 3], 0.0), ([1e9, 5e9, 1e8], 1e-8)] {
            let n = sizes.len();
            let links = Links { bandwidth: bandwidth[..n].to_vec(), latency: vec![latency; n] };
            let tensor = Tensor::new(&views, shape, 4, links.clone());
            let divides: Vec<usize> = (0..states.len()).filter(|&i| tensor.divides(&states[i])).collect();
            for &start in divides.iter().step_by(5) {
                let least = exhaustive(&tensor, &states, start);
                let of = |state: &State| {
                    let specs: Vec<Vec<&str>> =
                        state.specs.iter().map(|spec| spec.iter().map(|&factor| names[factor]).collect()).collect();
                    let specs: Vec<&[&str]> = specs.iter().map(|spec| &spec[..]).collect();
                    partition(&mesh, &specs, &[], shape)
                };
                let source = of(&states[start]);
                for &end in &divides {
                    let found = sequence(&views, &source, &of(&states[end]), 4, &links, &mut never).unwrap().unwrap();
                    let seconds: f64 = found.steps.iter().map(|step| step.seconds).sum();
                    let off = (seconds - least[end]).abs();
                    assert!(off <= 1e-9 * seconds, "{:?} {:?} {seconds} {}", states[start], states[end], least[end]);
                }
            }
        }
    }
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
fn many_axes_are_bounded_and_can_be_interrupted() {
    let names: Vec<String> = (0..14).map(|axis| format!("a{axis}")).collect();
    let mesh = Arc::new(Mesh::new(&names, &[2; 14]).unwrap());
    let of = |order: &dyn Fn(usize) -> usize| {
        let mut specs = vec![Vec::new(); 3];
        (0..14).for_each(|i| specs[order(i) % 4 % 3].push(names[(i * 5 + order(i)) % 14].clone()));
        let mut used = HashSet::new();
        specs.iter_mut().for_each(|spec: &mut Vec<String>| spec.retain(|name| used.insert(name.clone())));
        let layout = Layout::new(mesh.clone(), &specs, &[]).unwrap();
        Partition::new(Arc::new(layout), &[1 << 14; 3], Uneven::Even).unwrap()
    };
    let (source, destination) = (of(&|i| i * 7 + 3), of(&|i| i * 11 % 13));
    let found = found(&source, &destination, 1e9, 1e-6);
    check(&source, &destination, &found);
    let views = views(&mesh, &mesh).unwrap();
    let links = Links { bandwidth: vec![1e9; 14], latency: vec![1e-6; 14] };
    let mut calls = 0;
    let mut stop = || {
        calls += 1;
        if calls == 3 { Err(crate::error::Error::Interrupted) } else { Ok(()) }
    };
    let stopped = sequence(&views, &source, &destination, 4, &links, &mut stop);
    assert_eq!(stopped, Err(crate::error::Error::Interrupted));
}

#[test]
fn the_kinds_have_the_names_that_people_use() {
    let names = ["slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"];
    assert_eq!(Kind::ALL.map(Kind::name), names);
}

/// Meshes of the same devices, and on each a layout of as many dims.
fn view_pair() -> impl Strategy<Value = (Partition, Partition)> {
    let shapes = prop::sample::select(vec![
        vec![12_i64],
        vec![2, 6],
        vec![6, 2],
        vec![2, 3, 2],
        vec![4, 3],
        vec![3, 4],
        vec![2, 2, 3],
        vec![1, 12],
    ]);
    let side = (shapes, prop::collection::vec((0..3_usize, any::<u16>()), 3));
    (side.clone(), side).prop_map(|(a, b)| (on_mesh(&a.0, &a.1), on_mesh(&b.0, &b.1)))
}

fn on_mesh(sizes: &[i64], roles: &[(usize, u16)]) -> Partition {
    let names: Vec<String> = (0..sizes.len()).map(|axis| format!("a{axis}")).collect();
    let mesh = Arc::new(Mesh::new(&names, sizes).unwrap());
    let mut specs = vec![BTreeMap::new(); 2];
    for (name, &(role, order)) in names.iter().zip(roles).filter(|(_, (role, _))| *role < 2) {
        specs[role].insert((order, name.clone()), name.clone());
    }
    let specs: Vec<Vec<String>> = specs.into_iter().map(|spec| spec.into_values().collect()).collect();
    Partition::new(Arc::new(Layout::new(mesh, &specs, &[]).unwrap()), &[24, 12], Uneven::Even).unwrap()
}

proptest! {
    #[test]
    fn a_sequence_between_two_views_ends_where_it_should((source, destination) in view_pair()) {
        if let Ok(views) = views(source.mesh(), destination.mesh()) {
            let n = views.factors().len();
            let links = Links { bandwidth: vec![1e9; n], latency: vec![1e-9; n] };
            let found = sequence(&views, &source, &destination, 4, &links, &mut never).unwrap().unwrap();
            check(&source, &destination, &found);
        }
    }
}
