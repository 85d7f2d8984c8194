//! The cuts with which the fewest bytes move: of those that follow from taking the tensors' layouts in some order.

use std::sync::Arc;

use super::{
    axes,
    op::{Op, Settled, of_cuts},
    project::{self, Specs, Tensor},
};
use crate::{
    collective::{cost::Links, search::sequence, views::Views},
    error::Result,
    factor::rule::{Kind, Rule},
    layout::Layout,
    mesh::Mesh,
    parallel,
    partition::Partition,
    radix,
    sub_axis::SubAxis,
    uneven::Uneven,
};

/// The most tensors whose orders are all looked at; of more, each goes first once.
const FEW: usize = 4;

pub(super) fn settle(op: Op<'_>) -> Result<Option<Settled>> {
    let operands = op.rule.operands();
    let ways = ways(op.mesh, op.rule, op.layouts, op.kept, None);
    let found = cheapest(op.rule, &ways, |tensor, outer, inner, summed| {
        let summed: Vec<SubAxis> = summed.iter().copied().filter(|axis| !op.kept.contains(axis)).collect();
        let (from, to, summed): (_, _, &[SubAxis]) =
            if tensor < operands { (outer, inner, &[]) } else { (inner, outer, &summed) };
        price(op.mesh, op.shapes[tensor], from, to, summed, op.itemsizes[tensor])
    })?;
    Ok(found.map(|found| ways[found].clone()))
}

/// The ways to compute: those of the orders of tensors, and that of `other` cuts, each once, whose results are addends over the
/// axes that are `kept`.
pub(super) fn ways(
    mesh: &Mesh,
    rule: &Rule,
    layouts: &[Option<Specs>],
    kept: &[SubAxis],
    other: Option<Vec<Vec<SubAxis>>>,
) -> Vec<Settled> {
    let given: Vec<usize> = (0..rule.tensors()).filter(|tensor| layouts[*tensor].is_some()).collect();
    let projected: Vec<Tensor> =
        (0..rule.tensors()).map(|tensor| project::project(rule, tensor, layouts[tensor].as_ref(), true)).collect();
    let in_order = |order: &Vec<usize>| [true, false].map(|summed| in_order(mesh, rule, &projected, order, summed));
    let mut found: Vec<Settled> = Vec::new();
    for mut cuts in orders(&given).iter().flat_map(in_order).chain(other) {
        project::in_one_piece(rule, &mut cuts);
        if found.iter().all(|way| way.cuts != cuts) {
            let layout = |tensor: usize| layouts[tensor].clone().unwrap_or_else(|| of_cuts(rule, tensor, &cuts));
            let layouts = (0..rule.tensors()).map(layout).collect();
            found.push(Settled::new(rule, cuts, layouts));
        }
    }
    found.retain(|way| kept.iter().all(|axis| way.summed.contains(axis)));
    found
}

/// The number of the cheapest of some ways to compute; `price` says what it costs to have a tensor of one layout, its value's, in another, that
/// it computes with, where results are addends over some axes.
pub(super) fn cheapest(
    rule: &Rule,
    ways: &[Settled],
    mut price: impl FnMut(usize, &Specs, &Specs, &[SubAxis]) -> Result<i64>,
) -> Result<Option<usize>> {
    let mut best: Option<((i64, i64), usize)> = None;
    for (number, settled) in ways.iter().enumerate() {
        let mut bytes = 0_i64;
        for (tensor, (outer, inner)) in settled.layouts.iter().zip(&settled.local).enumerate() {
            let summed: &[SubAxis] = if tensor < rule.operands() { &[] } else { &settled.summed };
            if outer != inner || !summed.is_empty() {
                bytes = bytes.saturating_add(price(tensor, outer, inner, summed)?);
            }
        }
        // Of the same bytes, what leaves each device the least to do.
        let cost = (bytes, -settled.cuts.iter().map(|list| axes::shards(list)).product::<i64>());
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, number));
        }
    }
    Ok(best.map(|(_, number)| number))
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
fn in_order(mesh: &Mesh, rule: &Rule, tensors: &[Tensor], order: &[usize], summed: bool) -> Vec<Vec<SubAxis>> {
    let mut cuts: Vec<Vec<SubAxis>> = vec![Vec::new(); rule.factors().len()];
    for &tensor in order {
        for (factor, cut) in tensors[tensor].iter().enumerate() {
            let Some(cut) = cut else { continue };
            let stays = match rule.factors()[factor].kind {
                Kind::Pass => true,
                Kind::Sum => summed,
                Kind::Whole | Kind::Shift => false,
            };
            if stays && axes::prefix(&cuts[factor], &cut.axes) == axes::Prefix::Strict {
                let mut list = cut.axes.clone();
                for (_, other) in cuts.iter().enumerate().filter(|(other, _)| *other != factor) {
                    axes::cut_off(&mut list, other, mesh);
                }
                if list.len() >= cuts[factor].len() {
                    cuts[factor] = list;
                }
            }
        }
    }
    cuts
}

/// The bytes that a device receives for a change of layout, of addends over `summed`; a dim that does not divide counts as the
/// next that does.
pub(super) fn price(
    mesh: &Arc<Mesh>,
    shape: &[i64],
    from: &Specs,
    to: &Specs,
    summed: &[SubAxis],
    itemsize: i64,
) -> Result<i64> {
    if from == to && summed.is_empty() {
        return Ok(0);
    }
    let even = |(size, (from, to)): (&i64, (&Vec<SubAxis>, &Vec<SubAxis>))| {
        let (from, to) = (axes::shards(from), axes::shards(to));
        let both = from / radix::gcd(from, to) * to;
        radix::ceil_div(*size, both) * both
    };
    let shape: Vec<i64> = shape.iter().zip(from.iter().zip(to)).map(even).collect();
    let (from, to) = (partition(mesh, from, summed, &shape)?, partition(mesh, to, &[], &shape)?);
    sequenced(mesh, &from, &to, itemsize)
}

fn partition(mesh: &Arc<Mesh>, specs: &Specs, summed: &[SubAxis], shape: &[i64]) -> Result<Partition> {
    let names = |list: &[SubAxis]| list.iter().map(|axis| axis.name(mesh)).collect::<Vec<String>>();
    let specs: Vec<Vec<String>> = specs.iter().map(|list| names(list)).collect();
    let layout = Layout::new(mesh.clone(), &specs, &names(summed))?;
    Partition::new(Arc::new(layout), shape, Uneven::Even)
}

fn sequenced(mesh: &Mesh, from: &Partition, to: &Partition, itemsize: i64) -> Result<i64> {
    use crate::collective::views::Side;
    let (source, destination) = (Side { mesh, refined: from.mesh() }, Side { mesh, refined: to.mesh() });
    let Ok(views) = Views::new(source, destination, None) else { return Ok(i64::MAX / 4) };
    let count = views.factors().len();
    let links = Links { bandwidth: vec![1.0; count], latency: vec![0.0; count] };
    let found = sequence(&views, from, to, itemsize, &links, &mut parallel::never)?;
    Ok(found.map_or(i64::MAX / 4, |found| found.steps.iter().map(|step| step.bytes).sum()))
}
