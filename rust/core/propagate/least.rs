//! The cuts with which the fewest bytes move: of those that follow from taking the tensors' layouts in some order.

use std::sync::Arc;

use super::{
    axes,
    meet::Cuts,
    op::Lowered,
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

/// The cuts to compute with: those that come of the orders of tensors, and `other`, each once.
pub(super) fn ways(mesh: &Mesh, rule: &Rule, tensors: &[Tensor], other: Option<Cuts>) -> Vec<Cuts> {
    let all: Vec<usize> = (0..tensors.len()).collect();
    let in_order = |order: &Vec<usize>| [true, false].map(|summed| in_order(mesh, rule, tensors, order, summed));
    let mut found: Vec<Cuts> = Vec::new();
    for mut cuts in orders(&all).iter().flat_map(in_order).chain(other) {
        project::in_one_piece(rule, &mut cuts);
        if !found.contains(&cuts) {
            found.push(cuts);
        }
    }
    found
}

/// The number of the cheapest of some ways to compute; `price` says what the tensor of a number moves in one of them, which if it
/// is a result is addends over some axes.
pub(super) fn cheapest(
    rule: &Rule,
    ways: &[Arc<Lowered>],
    mut price: impl FnMut(usize, usize, &[SubAxis]) -> Result<i64>,
) -> Result<Option<usize>> {
    if ways.len() <= 1 {
        return Ok(ways.len().checked_sub(1));
    }
    let mut best: Option<((i64, i64), usize)> = None;
    for (number, way) in ways.iter().enumerate() {
        let mut bytes = 0_i64;
        for (tensor, inner) in way.local.iter().enumerate() {
            let summed: &[SubAxis] = if tensor < rule.operands() { &[] } else { &way.summed };
            if inner.is_some() || !summed.is_empty() {
                bytes = bytes.saturating_add(price(number, tensor, summed)?);
            }
        }
        // Of the same bytes, what leaves each device the least to do.
        let cost = (bytes, -way.cuts.iter().map(|list| axes::shards(list)).product::<i64>());
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
fn in_order(mesh: &Mesh, rule: &Rule, tensors: &[Tensor], order: &[usize], summed: bool) -> Cuts {
    let mut cuts: Cuts = vec![Vec::new(); rule.factors().len()];
    for &tensor in order {
        for (factor, cut) in tensors[tensor].iter().enumerate() {
            let Some(cut) = cut else { continue };
            let stays = match rule.factors()[factor].kind {
                // A dim of a kernel that no factor cuts has one of size 1, and is read whole.
                Kind::Pass => rule.factors()[factor].size != 1,
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
