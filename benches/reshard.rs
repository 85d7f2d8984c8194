//! Plans and runs, each beside the obvious way to do the same: `cargo bench --bench reshard`.

#![allow(missing_docs)]

use std::{hint::black_box, sync::Arc, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use shardwise_core::{
    collective::{cost::Links, search::sequence, views::Views},
    layout::Layout,
    mesh::Mesh,
    parallel::never,
    partition::Partition,
    plan::Plan,
    region::Regions,
    tiling::boxes::Boxes,
    uneven::Uneven,
};

fn grid(sizes: [i64; 2], shape: [i64; 2]) -> Arc<Partition> {
    let mesh = Arc::new(Mesh::new(&["x", "y"], &sizes).unwrap());
    let layout = Arc::new(Layout::new(mesh, &[["x"], ["y"]], &[]).unwrap());
    Arc::new(Partition::new(layout, &shape, Uneven::Ceil).unwrap())
}

/// The boxes of all devices in a list.
fn boxes_of(partition: &Partition) -> Regions {
    let mut bounds = vec![0; partition.mesh().size() as usize * 4];
    partition.boxes_into(&mut bounds, &mut never).unwrap();
    Regions::of_bounds(2, bounds.len() / 4, &bounds).unwrap()
}

/// Compares every source box with every destination box.
fn all_pairs(source: &Partition, destination: &Partition, out: &mut Vec<i64>) {
    out.clear();
    for d in 0..destination.mesh().size() {
        let to = destination.box_of(d).unwrap();
        for s in 0..source.mesh().size() {
            let from = source.box_of(s).unwrap();
            let common = |dim: usize| (from[dim].0.max(to[dim].0), from[dim].1.min(to[dim].1));
            let (rows, columns) = (common(0), common(1));
            if rows.0 < rows.1 && columns.0 < columns.1 {
                out.extend([s, d, rows.0, columns.0, rows.1, columns.1]);
            }
        }
    }
}

fn plans(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    for side in [4, 16, 64] {
        let (source, destination) = (grid([side, side], [8192, 8192]), grid([side / 2, side * 2], [8192, 8192]));
        let same = vec![-1; (side * side) as usize];
        let count = Plan::new(source.clone(), destination.clone(), same.clone(), &mut never).unwrap().transfers();
        let mut out = vec![0; count * 6];
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("shardwise", count), |b| {
            b.iter(|| {
                let plan = Plan::new(source.clone(), destination.clone(), same.clone(), &mut never).unwrap();
                plan.transfers_into(&mut out, &mut never).unwrap();
            })
        });
        // The same boxes in a list: found by the grid that they form, each time anew; and found already.
        let (listed, wanted) = (boxes_of(&source), boxes_of(&destination));
        let explicit = || Arc::new(Boxes::one_each(&[8192, 8192], listed.clone(), false).unwrap());
        let same_list = same.clone();
        group.bench_function(BenchmarkId::new("explicit boxes, and their index", count), |b| {
            b.iter(|| {
                let wanted = Arc::new(Boxes::one_each(&[8192, 8192], wanted.clone(), false).unwrap());
                let plan = Plan::new(explicit(), wanted, same_list.clone(), &mut never).unwrap();
                plan.transfers_into(&mut out, &mut never).unwrap();
            })
        });
        let (from, to) = (explicit(), Arc::new(Boxes::one_each(&[8192, 8192], wanted.clone(), false).unwrap()));
        group.bench_function(BenchmarkId::new("explicit boxes", count), |b| {
            b.iter(|| {
                let plan = Plan::new(from.clone(), to.clone(), same_list.clone(), &mut never).unwrap();
                plan.transfers_into(&mut out, &mut never).unwrap();
            })
        });
        if side <= 16 {
            let mut rows = Vec::new();
            group.bench_function(BenchmarkId::new("all pairs", count), |b| {
                b.iter(|| all_pairs(black_box(&source), &destination, &mut rows))
            });
            assert_eq!(rows, out);
        }
    }
    group.finish();
}

fn sequences(c: &mut Criterion) {
    let mesh = Arc::new(Mesh::new(&["a", "b", "c"], &[2, 4, 8]).unwrap());
    let cut = |specs: [&[&str]; 2]| {
        let layout = Arc::new(Layout::new(mesh.clone(), &specs, &[]).unwrap());
        Partition::new(layout, &[4096, 4096], Uneven::Even).unwrap()
    };
    let (source, destination) = (cut([&["a", "b"], &["c"]]), cut([&["c"], &["b", "a"]]));
    let links = Links { bandwidth: vec![1e10; 3], latency: vec![1e-6; 3] };
    let views = Views::new((&*mesh).into(), (&*mesh).into(), None).unwrap();
    c.bench_function("collectives/three axes", |b| {
        b.iter(|| sequence(&views, black_box(&source), &destination, 4, &links, &mut never))
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
    targets = plans, sequences
}
criterion_main!(benches);
