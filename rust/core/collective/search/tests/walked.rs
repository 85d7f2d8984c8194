//! Sequences carried out step by step, between all layouts, and against the cheapest of all.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;

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
