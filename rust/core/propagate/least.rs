//! The cuts with which the fewest bytes move: of those that follow from taking the tensors' layouts in some order.

use std::sync::Arc;

use super::{
    axes,
    op::{Op, Settled, of_cuts},
    project::{self, Specs},
};
use crate::{
    collective::{cost::Links, search::sequence, views::Views},
    error::Result,
    factor::rule::Kind,
    layout::Layout,
    mesh::Mesh,
    parallel,
    partition::Partition,
    sub_axis::{self, SubAxis},
    uneven::Uneven,
};

/// The most tensors whose orders are all looked at; of more, each goes first once.
const FEW: usize = 4;

pub(super) fn settle(op: Op<'_>) -> Result<Option<Settled>> {
    let given: Vec<usize> = (0..op.rule.tensors()).filter(|tensor| op.layouts[*tensor].is_some()).collect();
    let mut best: Option<(i64, i64, Settled)> = None;
    for order in orders(&given) {
        for summed in [true, false] {
            let cuts = in_order(op, &order, summed);
            if best.as_ref().is_some_and(|(_, _, found)| found.cuts == cuts) {
                continue;
            }
            let layout = |tensor: usize| op.layouts[tensor].clone().unwrap_or_else(|| of_cuts(op.rule, tensor, &cuts));
            let layouts = (0..op.rule.tensors()).map(layout).collect();
            let settled = Settled::new(op.rule, cuts, layouts);
            if !op.kept.iter().all(|axis| settled.summed.contains(axis)) {
                continue;
            }
            let bytes = bytes(op, &settled)?;
            // Of the same bytes, what leaves each device the least to do.
            let shards = -settled.cuts.iter().map(|list| axes::shards(list)).product::<i64>();
            if best.as_ref().is_none_or(|(least, most, _)| (bytes, shards) < (*least, *most)) {
                best = Some((bytes, shards, settled));
            }
        }
    }
    Ok(best.map(|(_, _, settled)| settled))
}

/// The orders in which tensors are taken.
fn orders(tensors: &[usize]) -> Vec<Vec<usize>> {
    if tensors.len() <= 1 {
        return vec![tensors.to_vec()];
    }
    let first = |at: usize| {
        let mut others = tensors.to_vec();
        let first = others.remove(at);
        let others = if tensors.len() <= FEW { orders(&others) } else { vec![others] };
        others.into_iter().map(move |others| [&[first][..], &others].concat())
    };
    (0..tensors.len()).flat_map(first).collect()
}

/// The cuts that the tensors' layouts give, of which each keeps what those before it leave; factors that are summed may be
/// left whole.
fn in_order(op: Op<'_>, order: &[usize], summed: bool) -> Vec<Vec<SubAxis>> {
    let mut cuts: Vec<Vec<SubAxis>> = vec![Vec::new(); op.rule.factors().len()];
    for &tensor in order {
        let projected = project::project(op.rule, tensor, op.layouts[tensor].as_ref(), true);
        for (factor, cut) in projected.iter().enumerate() {
            let Some(cut) = cut else { continue };
            let stays = match op.rule.factors()[factor].kind {
                Kind::Pass => true,
                Kind::Sum => summed,
                Kind::Whole | Kind::Shift => false,
            };
            if stays && axes::prefix(&cuts[factor], &cut.axes) == axes::Prefix::Strict {
                let mut list = cut.axes.clone();
                for (_, other) in cuts.iter().enumerate().filter(|(other, _)| *other != factor) {
                    axes::cut_off(&mut list, other, op.mesh);
                }
                if list.len() >= cuts[factor].len() {
                    cuts[factor] = list;
                }
            }
        }
    }
    cuts
}

/// The bytes that a device receives before and after the op.
fn bytes(op: Op<'_>, settled: &Settled) -> Result<i64> {
    let operands = op.rule.operands();
    let mut bytes = 0_i64;
    for tensor in 0..op.rule.tensors() {
        let (outer, inner) = (&settled.layouts[tensor], &settled.local[tensor]);
        let summed: Vec<SubAxis> = settled.summed.iter().copied().filter(|axis| !op.kept.contains(axis)).collect();
        let (from, to, summed): (_, _, &[SubAxis]) =
            if tensor < operands { (outer, inner, &[]) } else { (inner, outer, &summed) };
        if from == to && summed.is_empty() {
            continue;
        }
        let from = partition(op.mesh, from, summed, op.shapes[tensor])?;
        let to = partition(op.mesh, to, &[], op.shapes[tensor])?;
        bytes = bytes.saturating_add(price(op.mesh, &from, &to, op.itemsizes[tensor])?);
    }
    Ok(bytes)
}

fn partition(mesh: &Arc<Mesh>, specs: &Specs, summed: &[SubAxis], shape: &[i64]) -> Result<Partition> {
    let name = |axis: &SubAxis| {
        let name = &mesh.names()[axis.axis];
        if axis.size == mesh.sizes()[axis.axis] { name.clone() } else { sub_axis::text(name, axis.before, axis.size) }
    };
    let names = |list: &[SubAxis]| list.iter().map(name).collect::<Vec<String>>();
    let specs: Vec<Vec<String>> = specs.iter().map(|list| names(list)).collect();
    let layout = Layout::new(mesh.clone(), &specs, &names(summed))?;
    Partition::new(Arc::new(layout), shape, Uneven::Even)
}

fn price(mesh: &Mesh, from: &Partition, to: &Partition, itemsize: i64) -> Result<i64> {
    use crate::collective::views::Side;
    let (source, destination) = (Side { mesh, refined: from.mesh() }, Side { mesh, refined: to.mesh() });
    let Ok(views) = Views::new(source, destination, None) else { return Ok(i64::MAX / 4) };
    let count = views.factors().len();
    let links = Links { bandwidth: vec![1.0; count], latency: vec![0.0; count] };
    let found = sequence(&views, from, to, itemsize, &links, &mut parallel::never)?;
    Ok(found.map_or(i64::MAX / 4, |found| found.steps.iter().map(|step| step.bytes).sum()))
}
