//! The laws of partitions over everything small: every mesh, layout, shape and rule within the bounds below.
//!
//! Meshes of 1 to 3 axes of sizes 1 to 4; every layout of every rank up to 3 (each axis cuts some dim, at every place
//! of its spec, or replicates); every shape with dims of 0 to 6; all four rules. That is some ten million partitions.
//! The ordinary test goes through all of rank 0 to 2 and through every 97th of rank 3; the ignored one, which takes
//! minutes, through all: `cargo test --test exhaustive -- --ignored --nocapture`, or `make prove`, in parts.
//!
//! Each offset, shard and device is checked against lists made here by hand, without the crate's arithmetic:
//!
//! 1. `coordinate` is a bijection, and `device_index` its inverse;
//! 2. the shards tile the tensor, with the bounds that the rule's definition gives;
//! 3. the owner found by arithmetic is the owner found by marking the boxes, and the inverse leads back;
//!
//! and that replicas are numbered by device index, and runs cover the box.
//!
//! An unreduced axis is to all of this what a replicated one is, so it is left out here; the unit tests have it.

use shardwise_core::{
    error::Error,
    layout::Layout,
    mesh::Mesh,
    parallel::never,
    partition::{Bounds, Partition},
    runs::Runs,
    uneven::Uneven,
};
use small_scope::{NAMES, Part, layouts, lists, sum_of};
use std::{collections::HashMap, sync::Arc};

mod small_scope;

const LARGEST_AXIS: i64 = 4;
const LARGEST_DIM: i64 = 6;
const MOST_DIMS: usize = 3;

/// Start and stop of each piece, in order, as the definition of the rule says; `None` if it refuses.
fn pieces(n: i64, sizes: &[i64], rule: Uneven) -> Option<Pieces> {
    let whole: Vec<i64> = (0..n).collect();
    let count = sizes.iter().product::<i64>() as usize;
    let ceil = |elements: &[i64], count: usize| -> Vec<Vec<i64>> {
        let step = (0..).find(|step| step * count >= elements.len()).unwrap();
        (0..count).map(|i| elements.iter().skip(i * step).take(step).copied().collect()).collect()
    };
    let lists: Vec<Vec<i64>> = match rule {
        Uneven::Even if !whole.len().is_multiple_of(count) => return None,
        Uneven::Even | Uneven::Ceil => ceil(&whole, count),
        Uneven::Chunk => sizes
            .iter()
            .fold(vec![whole], |pieces, &size| pieces.iter().flat_map(|piece| ceil(piece, size as usize)).collect()),
        Uneven::Balanced => {
            let mut rest = whole.into_iter();
            let length = |i| whole_length(n, count, i);
            (0..count).map(|i| rest.by_ref().take(length(i)).collect()).collect()
        }
        Uneven::Floor => {
            let begins = |i: usize| n * i as i64 / count as i64;
            (0..count).map(|i| (begins(i)..begins(i + 1)).collect()).collect()
        }
    };
    Some(lists.iter().map(|list| list.first().map_or((n, n), |&first| (first, first + list.len() as i64))).collect())
}

/// Deals `n` elements out in turn: what piece `i` of `count` gets.
fn whole_length(n: i64, count: usize, i: usize) -> usize {
    (0..n as usize).filter(|element| element % count == i).count()
}

/// Start and stop of each piece.
type Pieces = Vec<(i64, i64)>;

/// The pieces of every dim over every list of axis sizes, made once; none where the rule refuses.
struct Expected(HashMap<(i64, Vec<i64>, &'static str), Option<Pieces>>);

impl Expected {
    fn new() -> Self {
        let mut all = HashMap::new();
        for len in 0..=NAMES.len() {
            for sizes in lists(len, 1, LARGEST_AXIS) {
                for n in 0..=LARGEST_DIM {
                    for rule in Uneven::ALL {
                        all.insert((n, sizes.clone(), rule.name()), pieces(n, &sizes, rule));
                    }
                }
            }
        }
        Self(all)
    }

    fn of(&self, n: i64, sizes: &[i64], rule: Uneven) -> Option<&Pieces> {
        self.0[&(n, sizes.to_vec(), rule.name())].as_ref()
    }
}

/// The offsets of a box, in C order.
fn offsets_in(bounds: &[(i64, i64)], shape: &[i64], out: &mut Vec<i64>) {
    out.clear();
    out.push(0);
    for (&(start, stop), &n) in bounds.iter().zip(shape) {
        *out = out.iter().flat_map(|&offset| (start..stop).map(move |i| offset * n + i)).collect();
    }
}

/// Law 1.
fn check_mesh(mesh: &Mesh) -> Vec<Vec<i64>> {
    let coordinates: Vec<Vec<i64>> = mesh.sizes().iter().fold(vec![vec![]], |lists, &size| {
        lists.iter().flat_map(|list| (0..size).map(move |n| [list.clone(), vec![n]].concat())).collect()
    });
    assert_eq!(mesh.size() as usize, coordinates.len());
    for (i, coordinate) in coordinates.iter().enumerate() {
        assert_eq!(&mesh.coordinate(i as i64).unwrap(), coordinate);
        assert_eq!(mesh.device_index(coordinate), Ok(i as i64));
    }
    let mut flat = vec![0; coordinates.len() * mesh.sizes().len()];
    mesh.coordinates_into(&mut flat, &mut never).unwrap();
    assert_eq!(flat, coordinates.concat());
    coordinates
}

/// For each device, its shard id and its replica id, by looking at the coordinates.
fn owners(layout: &Layout, coordinates: &[Vec<i64>]) -> Vec<(i64, i64)> {
    let sizes = layout.mesh().sizes();
    let id = |coordinate: &Vec<i64>| {
        let axes = layout.specs().iter().flatten();
        axes.fold(0, |id, &axis| id * sizes[axis] + coordinate[axis])
    };
    let mut held = HashMap::new();
    let numbered = |shard| {
        let next = held.entry(shard).or_insert(0);
        *next += 1;
        (shard, *next - 1)
    };
    coordinates.iter().map(id).map(numbered).collect()
}

/// Who holds which shard, which does not depend on the shape.
fn check_owners(partition: &Partition, owners: &[(i64, i64)]) {
    for (device, &(shard, replica)) in (0..).zip(owners) {
        assert_eq!(
            (partition.layout().shard_id(device), partition.layout().replica_id(device)),
            (Ok(shard), Ok(replica))
        );
    }
    for id in 0..partition.layout().total_shards() {
        let held: Vec<i64> = (0..).zip(owners).filter(|(_, owner)| owner.0 == id).map(|(device, _)| device).collect();
        assert_eq!(partition.layout().devices_holding(id), Ok(held));
    }
    let mut values = vec![-1; owners.len()];
    partition.layout().shard_ids_into(&mut values, &mut never).unwrap();
    assert!(values.iter().eq(owners.iter().map(|(shard, _)| shard)));
    partition.layout().replica_ids_into(&mut values, &mut never).unwrap();
    assert!(values.iter().eq(owners.iter().map(|(_, replica)| replica)));
}

#[derive(Default)]
struct Buffers {
    offsets: Vec<i64>,
    all: Vec<i64>,
    marks: Vec<(i64, i64)>,
    shards: Vec<i64>,
    locals: Vec<i64>,
    back: Vec<i64>,
    devices: Vec<i64>,
}

/// Laws 2 and 3, and the runs, of one partition.
fn check(partition: &Partition, expected: &[&Vec<(i64, i64)>], owners: &[(i64, i64)], buffers: &mut Buffers) {
    let Buffers { offsets, all, marks, shards, locals, back, devices } = buffers;
    let shape = partition.shape();
    let size = shape.iter().product::<i64>();
    assert_eq!(partition.size(), size);

    marks.clear();
    marks.resize(size as usize, (-1, -1));
    for id in 0..partition.layout().total_shards() {
        let mut rest = id;
        let mut bounds: Bounds = vec![(0, 0); shape.len()];
        for (bound, pieces) in bounds.iter_mut().zip(expected).rev() {
            *bound = pieces[rest as usize % pieces.len()];
            rest /= pieces.len() as i64;
        }
        assert_eq!(partition.box_of_shard(id).unwrap(), bounds);
        offsets_in(&bounds, shape, offsets);
        for (local, &offset) in offsets.iter().enumerate() {
            let mark = &mut marks[offset as usize];
            assert_eq!(*mark, (-1, -1), "two shards hold offset {offset} of {partition:?}");
            *mark = (id, local as i64);
        }
        let device = owners.iter().position(|owner| owner.0 == id).unwrap() as i64;
        let runs = Runs::of(partition, device).unwrap().to_vec().unwrap();
        assert!(runs.iter().flat_map(|&(start, len)| start..start + len).eq(offsets.iter().copied()));
        // As few as there can be: each begins where none ends.
        assert!(runs.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
    }
    assert!(!marks.contains(&(-1, -1)), "a hole in {partition:?}");

    all.clear();
    all.extend(0..size);
    for out in [&mut *shards, &mut *locals, &mut *back] {
        out.clear();
        out.resize(size as usize, -1);
    }
    partition.locate_into(all, shards, locals, &mut never).unwrap();
    assert!(shards.iter().copied().zip(locals.iter().copied()).eq(marks.iter().copied()), "{partition:?}");
    partition.global_offset_into(shards, locals, back, &mut never).unwrap();
    assert_eq!(back, all);
    for (&offset, &mark) in all.iter().zip(&*marks) {
        assert_eq!(partition.locate_one(offset), Ok(mark));
        assert_eq!(partition.global_offset_one(mark.0, mark.1), Ok(offset));
    }

    devices.clear();
    devices.resize(owners.len() * shape.len() * 2, -1);
    partition.boxes_into(devices, &mut never).unwrap();
    for (device, &(shard, _)) in (0..).zip(owners) {
        let bounds = partition.box_of(device).unwrap();
        assert_eq!(partition.box_of_shard(shard).unwrap(), bounds);
        let row = &devices[device as usize * shape.len() * 2..][..shape.len() * 2];
        assert!(row.chunks(2).map(|pair| (pair[0], pair[1])).eq(bounds));
    }
}

/// Every partition of one mesh that `selected` takes, by its rank and its turn; gives their number.
fn check_all_of(sizes: &[i64], expected: &Expected, selected: impl Fn(usize, usize) -> bool) -> usize {
    let mesh = Arc::new(Mesh::new(&NAMES[..sizes.len()], sizes).unwrap());
    let coordinates = check_mesh(&mesh);
    let mut buffers = Buffers::default();
    let (mut count, mut turn) = (0, 0);
    for rank in 0..=MOST_DIMS {
        let shapes = lists(rank, 0, LARGEST_DIM);
        for specs in layouts(sizes.len(), rank) {
            let names: Vec<Vec<&str>> =
                specs.iter().map(|spec| spec.iter().map(|&axis| NAMES[axis]).collect()).collect();
            let layout = Arc::new(Layout::new(Arc::clone(&mesh), &names, &[]).unwrap());
            let owners = owners(&layout, &coordinates);
            let over: Vec<Vec<i64>> = specs.iter().map(|spec| spec.iter().map(|&axis| sizes[axis]).collect()).collect();
            check_owners(&Partition::new(Arc::clone(&layout), &vec![0; rank], Uneven::Ceil).unwrap(), &owners);
            for shape in &shapes {
                for rule in Uneven::ALL {
                    turn += 1;
                    if !selected(rank, turn) {
                        continue;
                    }
                    let pieces: Option<Vec<_>> =
                        shape.iter().zip(&over).map(|(&n, s)| expected.of(n, s, rule)).collect();
                    let partition = Partition::new(Arc::clone(&layout), shape, rule);
                    match pieces {
                        Some(pieces) => check(&partition.unwrap(), &pieces, &owners, &mut buffers),
                        None => assert!(matches!(partition, Err(Error::Indivisible { .. }))),
                    }
                    count += 1;
                }
            }
        }
    }
    count
}

/// Every mesh; gives the number of partitions.
fn check_all(part: Part, selected: impl Fn(usize, usize) -> bool + Sync) -> usize {
    let meshes: Vec<Vec<i64>> = (1..=NAMES.len()).flat_map(|len| lists(len, 1, LARGEST_AXIS)).collect();
    let expected = Expected::new();
    let count = sum_of(&meshes, part, |sizes| check_all_of(sizes, &expected, &selected));
    println!("{} meshes, {count} cases", meshes.len());
    count
}

#[test]
fn small_partitions_keep_the_laws() {
    let all = Part { which: 0, of: 1 };
    assert!(check_all(all, |rank, turn| rank < MOST_DIMS || turn % 97 == 0) > 750_000);
}

#[test]
#[ignore = "takes minutes"]
fn all_small_partitions_keep_the_laws() {
    let part = Part::from_environment();
    assert!(check_all(part, |_, turn| part.has(turn)) > 9_000_000 / part.of);
}
