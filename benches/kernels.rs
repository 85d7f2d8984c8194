//! Each kernel beside the obvious way to do the same: `cargo bench`.
//!
//! Throughput is in elements, which are devices, offsets or runs; sizes go from 10² to 10⁷.

#![allow(missing_docs)]

use std::{hint::black_box, sync::Arc, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shardwise_core::{
    computation::{Computation, Does, Op, Ruled},
    factor::{Attribute, Attributes, rule},
    layout::Layout,
    mesh::Mesh,
    parallel::never,
    partition::Partition,
    propagate::{Flow, Ops, Policy, Start, propagate},
    runs::Runs,
    sub_axis::SubAxis,
    uneven::Uneven,
};

/// The tensor of the locate benches: GPT-2's vocabulary by a width that nothing divides, cut 9 × 7.
fn partition(uneven: Uneven) -> Partition {
    let mesh = Arc::new(Mesh::new(&["x", "y"], &[9, 7]).unwrap());
    let layout = Arc::new(Layout::new(mesh, &[["x"], ["y"]], &[]).unwrap());
    Partition::new(layout, &[50257, 7001], uneven).unwrap()
}

/// Numbers below `limit` without a pattern that a branch predictor could learn (a linear congruential generator).
fn scattered(count: usize, limit: i64) -> Vec<i64> {
    let step = |x: &u64| Some(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    std::iter::successors(Some(42), step).map(|x| (x >> 1) as i64 % limit).take(count).collect()
}

fn coordinates(c: &mut Criterion) {
    let mut group = c.benchmark_group("coordinates");
    for side in [10, 64, 316, 1000, 3162] {
        let mesh = Mesh::new(&["x", "y"], &[side, side]).unwrap();
        let devices = mesh.size() as usize;
        let mut out = vec![0; 2 * devices];
        group.throughput(Throughput::Elements(devices as u64));
        group.bench_function(BenchmarkId::new("shardwise", devices), |b| {
            b.iter(|| mesh.coordinates_into(&mut out, &mut never))
        });
        group.bench_function(BenchmarkId::new("naive", devices), |b| {
            b.iter(|| {
                for (i, row) in out.chunks_exact_mut(2).enumerate() {
                    let (i, side) = (i as i64, black_box(side));
                    (row[0], row[1]) = (i / side % side, i % side);
                }
            })
        });
    }
    group.finish();
}

fn boxes(c: &mut Criterion) {
    let mut group = c.benchmark_group("boxes");
    for side in [10, 64, 316, 1000] {
        let mesh = Arc::new(Mesh::new(&["x", "y"], &[side, side]).unwrap());
        let layout = Arc::new(Layout::new(mesh, &[["x"], ["y"]], &[]).unwrap());
        let p = Partition::new(layout, &[8192, 8191], Uneven::Ceil).unwrap();
        let devices = (side * side) as usize;
        let mut out = vec![0; 4 * devices];
        group.throughput(Throughput::Elements(devices as u64));
        group.bench_function(BenchmarkId::new("shardwise", devices), |b| b.iter(|| p.boxes_into(&mut out, &mut never)));
        group.bench_function(BenchmarkId::new("naive", devices), |b| {
            b.iter(|| {
                for (device, row) in out.chunks_exact_mut(4).enumerate() {
                    for (slot, (start, stop)) in row.chunks_exact_mut(2).zip(p.box_of(device as i64).unwrap()) {
                        (slot[0], slot[1]) = (start, stop);
                    }
                }
            })
        });
    }
    group.finish();
}

fn locate(c: &mut Criterion) {
    let mut group = c.benchmark_group("locate");
    for count in [100, 10_000, 1_000_000, 10_000_000] {
        group.throughput(Throughput::Elements(count as u64));
        for uneven in [Uneven::Ceil, Uneven::Balanced] {
            let p = partition(uneven);
            let offsets = scattered(count, p.size());
            let (mut ids, mut locals) = (vec![0; count], vec![0; count]);
            group.bench_function(BenchmarkId::new(format!("shardwise, {}", uneven.name()), count), |b| {
                b.iter(|| p.locate_into(&offsets, &mut ids, &mut locals, &mut never))
            });
            if uneven == Uneven::Ceil {
                group.bench_function(BenchmarkId::new("naive, ceil", count), |b| {
                    b.iter(|| {
                        for ((&offset, id), local) in offsets.iter().zip(&mut ids).zip(&mut locals) {
                            (*id, *local) = p.locate_one(offset).unwrap();
                        }
                    })
                });
                group.bench_function(BenchmarkId::new("copy twice", count), |b| {
                    b.iter(|| {
                        ids.copy_from_slice(black_box(&offsets));
                        locals.copy_from_slice(black_box(&offsets));
                    })
                });
            }
        }
    }
    group.finish();
}

fn global_offset(c: &mut Criterion) {
    let mut group = c.benchmark_group("global_offset");
    let p = partition(Uneven::Ceil);
    for count in [100, 10_000, 1_000_000, 10_000_000] {
        let mut offsets = scattered(count, p.size());
        let (mut ids, mut locals) = (vec![0; count], vec![0; count]);
        p.locate_into(&offsets, &mut ids, &mut locals, &mut never).unwrap();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("shardwise", count), |b| {
            b.iter(|| p.global_offset_into(&ids, &locals, &mut offsets, &mut never))
        });
        group.bench_function(BenchmarkId::new("naive", count), |b| {
            b.iter(|| {
                for ((offset, &id), &local) in offsets.iter_mut().zip(&ids).zip(&locals) {
                    *offset = p.global_offset_one(id, local).unwrap();
                }
            })
        });
    }
    group.finish();
}

fn runs(c: &mut Criterion) {
    let mut group = c.benchmark_group("runs");
    let mesh = Arc::new(Mesh::new(&["x"], &[4]).unwrap());
    let layout = Arc::new(Layout::new(mesh, &[&[][..], &[], &["x"]], &[]).unwrap());
    for rows in [100, 10_000, 1_000_000, 10_000_000] {
        let p = Partition::new(layout.clone(), &[rows / 10, 10, 64], Uneven::Even).unwrap();
        let mut out = vec![0; 2 * rows as usize];
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::new("shardwise", rows), |b| {
            b.iter(|| Runs::of(&p, 2)?.fill_into(&mut out, &mut never))
        });
        group.bench_function(BenchmarkId::new("naive", rows), |b| {
            let bounds = p.box_of(2).unwrap();
            b.iter(|| {
                let mut slots = out.chunks_exact_mut(2);
                for i in bounds[0].0..bounds[0].1 {
                    for j in bounds[1].0..bounds[1].1 {
                        let slot = slots.next().unwrap();
                        let offset: i64 = [i, j, bounds[2].0].iter().zip(p.strides()).map(|(a, b)| a * b).sum();
                        (slot[0], slot[1]) = (offset, bounds[2].1 - bounds[2].0);
                    }
                }
            })
        });
    }
    group.finish();
}

fn dims<'a>(name: &'a str, dims: &[i64]) -> (&'a str, Attribute) {
    (name, Attribute::Integers(dims.to_vec()))
}

/// The attributes of a product of the last dim of one tensor and the first of another.
fn product(last: i64) -> Attributes<'static> {
    Attributes(vec![dims("lhs_contracting_dimensions", &[last]), dims("rhs_contracting_dimensions", &[0])])
}

/// The factor rule of one op; the obvious way to do this is nobody's.
fn rules(c: &mut Criterion) {
    let mut group = c.benchmark_group("factor rule");
    let (x, w, y): (&[i64], &[i64], &[i64]) = (&[32, 2048, 4096], &[4096, 14336], &[32, 2048, 14336]);
    let (heads, joined): (&[i64], &[i64]) = (&[32, 2048, 64, 128], &[32, 2048, 8192]);
    let turned: &[i64] = &[32, 64, 2048, 128];
    let permutation = Attributes(vec![dims("permutation", &[0, 2, 1, 3])]);
    let none = Attributes::default();
    let attributes = product(2);
    let mut time = |op: &str, operands: &[&[i64]], results: &[&[i64]], attributes: &Attributes<'_>| {
        group.bench_function(op, |b| b.iter(|| rule(op, black_box(operands), results, attributes).unwrap()));
    };
    time("dot_general", &[x, w], &[y], &attributes);
    time("multiply", &[y, y], &[y], &none);
    time("reshape", &[heads], &[joined], &none);
    time("transpose", &[heads], &[turned], &permutation);
    group.finish();
}

/// Layouts through products and what is elementwise, by each policy; throughput is in ops.
fn layouts(c: &mut Criterion) {
    let mut group = c.benchmark_group("layouts of ops");
    let (x, w): (Arc<[i64]>, Arc<[i64]>) = (Arc::from([64, 128]), Arc::from([128, 128]));
    let f32: Arc<str> = Arc::from("float32");
    let ruled = |op: &str, operands: &[&[i64]], attributes: &Attributes<'_>| {
        let rule = rule(op, operands, &[&x], attributes).unwrap();
        let shapes = operands.iter().copied().chain([&*x]).map(Arc::from).collect();
        Arc::new(Ruled { name: op.to_owned(), rule, shapes, feature: None })
    };
    let both = [ruled("dot_general", &[&x, &w], &product(1)), ruled("tanh", &[&x], &Attributes::default())];
    let mesh = Arc::new(Mesh::new(&["dp", "tp"], &[8, 4]).unwrap());
    let start = |specs: [&[SubAxis]; 2]| {
        let specs = specs.map(<[SubAxis]>::to_vec).to_vec();
        Some(Arc::new(Start { specs, open: vec![false; 2], priorities: vec![0; 2] }))
    };
    let starts = vec![start([&[SubAxis { axis: 0, before: 1, size: 8 }], &[]]), start([&[], &[]])];
    for count in [100, 10_000] {
        let op = |number: usize| {
            let before = if number == 0 { 0 } else { number + 1 };
            let operands = if number.is_multiple_of(2) { vec![before, 1] } else { vec![before] };
            Op { operands, results: vec![number + 2], does: Does::Rule(both[number % 2].clone()) }
        };
        let mut shapes = vec![x.clone(); count + 2];
        shapes[1] = w.clone();
        let (dtypes, ops) = (vec![f32.clone(); count + 2], (0..count).map(op).collect());
        let computation = Computation { shapes, dtypes, inputs: 2, ops, outputs: vec![count + 1] };
        group.throughput(Throughput::Elements(count as u64));
        for (name, policy) in [("explicit", Policy::Explicit), ("shardy", Policy::Shardy), ("least", Policy::Least)] {
            group.bench_function(BenchmarkId::new(name, count), |b| {
                b.iter(|| {
                    let ops = Arc::new(Ops::new(&computation).unwrap());
                    let flow = Flow::new(&ops, &mesh, [starts.clone(), vec![None]]).unwrap();
                    let itemsizes = vec![4; flow.shapes.len()];
                    propagate(vec![flow], &itemsizes, policy).unwrap().unwrap()
                })
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
    targets = coordinates, boxes, locate, global_offset, runs, rules, layouts
}
criterion_main!(benches);
