use super::*;
use crate::{mesh::Mesh, uneven::Uneven};
use std::{collections::HashSet, sync::Arc};

fn links(axes: usize) -> Links {
    Links { bandwidth: vec![1e9; axes], latency: vec![1e-6; axes] }
}

fn partition(mesh: &Arc<Mesh>, specs: &[&[&str]], unreduced: &[&str], shape: &[i64]) -> Partition {
    Partition::new(Arc::new(Layout::new(mesh.clone(), specs, unreduced).unwrap()), shape, Uneven::Ceil).unwrap()
}

/// The kinds, with the bytes that each device receives.
fn kinds(source: &Partition, destination: &Partition) -> Vec<(Kind, i64)> {
    let steps = sequence(source, destination, 4, &links(source.mesh().sizes().len())).unwrap();
    steps.into_iter().map(|step| (step.kind, step.bytes)).collect()
}

#[test]
fn each_collective_is_found_where_it_is_all_that_is_needed() {
    // Bytes by hand: a tensor of 64 x 64 float32 is 16,384 bytes.
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
    let of = |specs: [&[&str]; 2], unreduced: &[&str]| partition(&mesh, &specs, unreduced, &[64, 64]);
    let (rows, columns, whole) = (of([&["y"], &[]], &[]), of([&[], &["y"]], &[]), of([&[], &[]], &[]));
    assert_eq!(kinds(&whole, &rows), [(Kind::Slice, 0)]);
    assert_eq!(kinds(&rows, &whole), [(Kind::AllGather, 3 * 4096)]);
    assert_eq!(kinds(&rows, &columns), [(Kind::AllToAll, 3 * 1024)]);
    assert_eq!(kinds(&of([&["x", "y"], &[]], &[]), &of([&["y", "x"], &[]], &[])), [(Kind::Permute, 2048)]);
    assert_eq!(kinds(&rows, &rows), []);
}

#[test]
fn partial_sums_are_reduced_where_they_must_be() {
    let mesh = Arc::new(Mesh::new(&["y"], &[4]).unwrap());
    let of = |specs: [&[&str]; 2], unreduced: &[&str]| partition(&mesh, &specs, unreduced, &[64, 64]);
    let sums = of([&[], &[]], &["y"]);
    assert_eq!(kinds(&sums, &of([&["y"], &[]], &[])), [(Kind::ReduceScatter, 3 * 4096)]);
    assert_eq!(kinds(&sums, &of([&[], &[]], &[])), [(Kind::AllReduce, 6 * 4096)]);
    // Sums over two axes are one all-reduce: in a ring of 8, 2 * 7/8 of 16,384 bytes.
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
    let of = |specs: [&[&str]; 2], unreduced: &[&str]| partition(&mesh, &specs, unreduced, &[64, 64]);
    assert_eq!(kinds(&of([&[], &[]], &["x", "y"]), &of([&[], &[]], &[])), [(Kind::AllReduce, 7 * 4096)]);
    // Replicas along x halve the work: each sums up one half, and they exchange the results.
    let found = kinds(&of([&[], &[]], &["y"]), &of([&["y"], &[]], &[]));
    assert_eq!(found, [(Kind::Slice, 0), (Kind::ReduceScatter, 3 * 2048), (Kind::AllGather, 2048)]);
}

#[test]
fn neighbours_of_one_kind_are_one_step() {
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
    let of = |specs: [&[&str]; 1]| partition(&mesh, &specs, &[], &[64]);
    let steps = sequence(&of([&["x", "y"]]), &of([&[]]), 4, &links(2)).unwrap();
    assert_eq!((steps.len(), steps[0].kind, &steps[0].axes[..]), (1, Kind::AllGather, &[0, 1][..]));
    assert_eq!(steps[0].bytes, 7 * 32);
}

#[test]
fn gathering_the_major_axis_goes_the_cheaper_way() {
    // ("x", "y") to ("y"): putting the axes in order and gathering moves 2 KiB + 2 KiB; gathering all, 14 KiB.
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
    let of = |spec: &[&str]| partition(&mesh, &[spec], &[], &[4096]);
    let found = kinds(&of(&["x", "y"]), &of(&["y"]));
    assert_eq!(found, [(Kind::Permute, 2048), (Kind::AllGather, 2048)]);
    // Where messages are dear and bytes cheap, one gather of everything would still be two messages more.
    let dear = Links { bandwidth: vec![1e12; 2], latency: vec![1.0; 2] };
    let steps = sequence(&of(&["x", "y"]), &of(&["y"]), 4, &dear).unwrap();
    assert_eq!(steps.iter().map(|step| step.kind).collect::<Vec<_>>(), [Kind::Permute, Kind::AllGather]);
}

#[test]
fn a_dim_that_does_not_divide_has_no_sequence() {
    let mesh = Arc::new(Mesh::new(&["x"], &[4]).unwrap());
    let of = |spec: &[&str]| partition(&mesh, &[spec], &[], &[6]);
    assert_eq!(sequence(&of(&["x"]), &of(&[]), 4, &links(1)), None);
}

#[test]
fn every_pair_of_layouts_has_a_sequence_that_ends_there_and_is_the_cheapest_of_all_short_ones() {
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 2]).unwrap());
    let specs: [[&[&str]; 2]; 11] = [
        [&[], &[]],
        [&["x"], &[]],
        [&["y"], &[]],
        [&[], &["x"]],
        [&[], &["y"]],
        [&["x"], &["y"]],
        [&["y"], &["x"]],
        [&["x", "y"], &[]],
        [&["y", "x"], &[]],
        [&[], &["x", "y"]],
        [&[], &["y", "x"]],
    ];
    let links = links(2);
    for a in &specs {
        let source = partition(&mesh, a, &[], &[8, 8]);
        let search = Search { shape: source.shape(), sizes: mesh.sizes(), itemsize: 4, links: &links };
        let start = search.state(source.layout());
        for b in &specs {
            let destination = partition(&mesh, b, &[], &[8, 8]);
            let goal = search.state(destination.layout());
            let moves = search.cheapest(&start, &goal).unwrap();
            assert_eq!(moves.last().map_or(&start, |step| &step.after), &goal);
            let safe = search.by_way_of_replication(&start, &goal);
            assert_eq!(safe.last().map_or(&start, |step| &step.after), &goal);
            let cost = |moves: &[Move]| {
                let mut before = &start;
                moves.iter().fold(0.0, |sum, step| {
                    let more = search.seconds(before, step);
                    before = &step.after;
                    sum + more
                })
            };
            let least = exhaustive(&search, &start, &goal, 3);
            assert!(cost(&moves) <= least + 1e-12 && cost(&moves) <= cost(&safe) + 1e-12, "{a:?} {b:?}");
        }
    }
}

/// The cost of the cheapest sequence of at most `depth` moves.
fn exhaustive(search: &Search<'_>, state: &State, goal: &State, depth: usize) -> f64 {
    if state == goal {
        return 0.0;
    }
    if depth == 0 {
        return f64::INFINITY;
    }
    let next = search.moves(state, goal).into_iter();
    next.map(|step| search.seconds(state, &step) + exhaustive(search, &step.after, goal, depth - 1))
        .fold(f64::INFINITY, f64::min)
}

/// What becomes of `before` in a step of this kind along these axes: the table in the module's documentation.
fn expected(before: &State, step: &Step, sizes: &[i64]) -> State {
    let mut after = before.clone();
    let take = |from: &mut Vec<usize>| {
        let left = from.len() - step.axes.len();
        assert_eq!(from.split_off(left), step.axes);
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

#[test]
fn every_step_does_what_its_kind_says() {
    let names = ["x", "y", "z"];
    let mesh = Arc::new(Mesh::new(&names, &[2, 4, 2]).unwrap());
    // Each axis cuts one of two dims, or none, or is unreduced; in both orders.
    let layouts = |roles: usize| {
        (0..2 * roles.pow(3)).map(move |code| {
            let (mut all, mut rest) = (vec![vec![]; 4], code / 2);
            for name in names {
                all[rest % roles].push(name);
                rest /= roles;
            }
            all.iter_mut().filter(|_| code % 2 == 1).for_each(|spec| spec.reverse());
            all
        })
    };
    let pairs = layouts(4).flat_map(|a| layouts(3).map(move |b| (a.clone(), b)));
    let mut kinds = HashSet::new();
    for (a, b) in pairs.step_by(23) {
        let of = |all: &[Vec<&'static str>]| {
            let layout = Layout::new(mesh.clone(), &all[..2], &all[3]).unwrap();
            Partition::new(Arc::new(layout), &[8, 4], Uneven::Ceil).unwrap()
        };
        let (source, destination) = (of(&a), of(&b));
        let Some(steps) = sequence(&source, &destination, 4, &links(3)) else { continue };
        let links = links(3);
        let search = Search { shape: &[8, 4], sizes: mesh.sizes(), itemsize: 4, links: &links };
        let (mut state, goal) = (search.state(source.layout()), search.state(destination.layout()));
        let always: Vec<Step> = search.priced(state.clone(), search.by_way_of_replication(&state, &goal));
        let mut other = state.clone();
        for step in &always {
            other = expected(&other, step, mesh.sizes());
            assert_eq!(other, step.after, "{a:?} {b:?} {step:?}");
        }
        for step in &steps {
            state = expected(&state, step, mesh.sizes());
            assert_eq!(state, step.after, "{a:?} {b:?} {step:?}");
            for (n, spec) in [8, 4].iter().zip(&state.specs) {
                assert_eq!(n % spec.iter().map(|&axis| mesh.sizes()[axis]).product::<i64>(), 0);
            }
            kinds.insert(step.kind);
        }
        assert_eq!((&state, &other), (&goal, &goal));
    }
    assert_eq!(kinds.len(), 6, "{kinds:?}");
}

#[test]
fn the_seconds_are_those_of_the_model() {
    // A second per message along x and three along y; 16 and 32 bytes a second. A tensor of 64 bytes.
    let links = Links { bandwidth: vec![16.0, 32.0], latency: vec![1.0, 3.0] };
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
    let of = |spec: &[&str], unreduced: &[&str]| partition(&mesh, &[spec], unreduced, &[16]);
    let seconds = |source: &Partition, destination: &Partition| {
        let steps = sequence(source, destination, 4, &links).unwrap();
        steps.into_iter().map(|step| (step.kind, step.axes, step.seconds)).collect::<Vec<_>>()
    };
    let whole = of(&[], &[]);
    assert_eq!(seconds(&whole, &of(&["y"], &[])), [(Kind::Slice, vec![1], 0.0)]);
    // Three messages, 48 bytes.
    assert_eq!(seconds(&of(&["y"], &[]), &whole), [(Kind::AllGather, vec![1], 9.0 + 1.5)]);
    // Six messages, twice 48 bytes.
    let sums = of(&["x"], &["y"]);
    assert_eq!(seconds(&sums, &of(&["x"], &[])), [(Kind::AllReduce, vec![1], 18.0 + 1.5)]);
    // One message along both, all 8 bytes over the slower link.
    let swapped = seconds(&of(&["x", "y"], &[]), &of(&["y", "x"], &[]));
    assert_eq!(swapped, [(Kind::Permute, vec![0, 1], 4.0 + 0.5)]);
}

#[test]
fn neighbours_stay_apart_where_one_link_is_slow() {
    // Of 32 bytes each: once over the slow link x to change places, once more to gather x, and the rest over the fast
    // link y. Gathering x after y would take 128 bytes over x, and both at once all 224.
    let links = Links { bandwidth: vec![1e3, 1e9], latency: vec![0.0; 2] };
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
    let of = |spec: &[&str]| partition(&mesh, &[spec], &[], &[64]);
    let steps = sequence(&of(&["x", "y"]), &of(&[]), 4, &links).unwrap();
    let found: Vec<_> = steps.iter().map(|step| (step.kind, &step.axes[..], step.bytes)).collect();
    let axes: [&[usize]; 3] = [&[0, 1], &[0], &[1]];
    assert_eq!(
        found,
        [(Kind::Permute, axes[0], 32), (Kind::AllGather, axes[1], 32), (Kind::AllGather, axes[2], 3 * 64)]
    );
}

#[test]
fn axes_of_size_1_need_no_step_and_of_equal_costs_the_fewest_steps_win() {
    let mesh = Arc::new(Mesh::new(&["x", "one", "y"], &[2, 1, 2]).unwrap());
    let of = |specs: [&[&str]; 2]| partition(&mesh, &specs, &[], &[8, 8]);
    assert_eq!(kinds(&of([&["one"], &["x"]]), &of([&[], &["x"]])), []);
    let free = Links { bandwidth: vec![f64::INFINITY; 3], latency: vec![0.0; 3] };
    let all: [[&[&str]; 2]; 6] =
        [[&["x"], &[]], [&["y"], &[]], [&[], &["x"]], [&["x"], &["y"]], [&["y"], &["x"]], [&["x", "y"], &[]]];
    for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
        let steps = sequence(&of(*a), &of(*b), 4, &free).unwrap();
        let search = Search { shape: &[8, 8], sizes: mesh.sizes(), itemsize: 4, links: &free };
        let (source, destination) = (of(*a), of(*b));
        let (start, goal) = (search.state(source.layout()), search.state(destination.layout()));
        assert_eq!(steps.len(), fewest(&search, &start, &goal), "{a:?} {b:?}");
    }
}

/// The number of moves of the shortest sequence, by trying all of one move, then all of two, and so on.
fn fewest(search: &Search<'_>, start: &State, goal: &State) -> usize {
    let mut reached = vec![start.clone()];
    let mut moves = 0;
    while !reached.contains(goal) {
        reached = reached.iter().flat_map(|state| search.moves(state, goal)).map(|step| step.after).collect();
        moves += 1;
    }
    moves
}

#[test]
fn the_kinds_have_the_names_that_people_use() {
    let kinds = [Kind::Slice, Kind::AllGather, Kind::AllToAll, Kind::ReduceScatter, Kind::AllReduce, Kind::Permute];
    let names = ["slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective permute"];
    assert_eq!(kinds.map(Kind::name), names);
}
