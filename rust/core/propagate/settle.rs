//! An op settled: how it computes, by each policy.

use super::{
    agree, axes, least, meet,
    op::{Conflict, Op, Policy, Settled, Specs, of_cuts},
    project,
};
use crate::{
    error::Result,
    factor::rule::{Kind, Rule},
};

/// Says how the op computes with these layouts, by a policy.
///
/// # Errors
/// Those of a layout that does not fit its shape.
///
/// ```
/// use shardwise_core::{factor::{Kind, Reduction, Rule}, mesh::Mesh, propagate::{Op, Policy, settle}, sub_axis::SubAxis};
/// let mesh = std::sync::Arc::new(Mesh::new(&["dp", "tp"], &[2, 4])?);
/// let shapes: [&[i64]; 3] = [&[8, 16], &[16, 32], &[8, 32]];
/// let rule = Rule::parse("([i,k],[k,j])->([i,j])", &[("k", Kind::Sum)], &[], &[], Reduction::Add, &[])?.sized(&shapes)?;
/// let [dp, tp] = [SubAxis { axis: 0, before: 1, size: 2 }, SubAxis { axis: 1, before: 1, size: 4 }];
/// let layouts = [Some(vec![vec![dp], vec![]]), Some(vec![vec![], vec![tp]]), None];
/// let op = Op { mesh: &mesh, rule: &rule, shapes: &shapes, layouts: &layouts, itemsizes: &[4; 3], kept: &[] };
/// assert_eq!(settle(op, Policy::Explicit)?.unwrap().layouts[2], [[dp], [tp]]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn settle(op: Op<'_>, policy: Policy) -> Result<std::result::Result<Settled, Conflict>> {
    match policy {
        Policy::Least => Ok(least::settle(op)?.ok_or(Conflict::NotSummed)),
        Policy::Shardy => {
            let found = shardy(op);
            let stays = op.kept.iter().all(|axis| found.summed.contains(axis));
            Ok(if stays { Ok(found) } else { Err(Conflict::NotSummed) })
        }
        Policy::Explicit => match explicit(op) {
            Err(conflict) => Ok(Err(conflict)),
            Ok(layouts) => Ok(least::settle(Op { layouts: &layouts, ..op })?.ok_or(Conflict::NotSummed)),
        },
    }
}

fn shardy(op: Op<'_>) -> Settled {
    let (rule, mesh) = (op.rule, op.mesh.as_ref());
    let all = 0..rule.tensors();
    let of = |tensor: usize| project::project(rule, tensor, op.layouts[tensor].as_ref(), op.layouts[tensor].is_some());
    let mut tensors: Vec<project::Tensor> = all.clone().map(of).collect();
    while agree::agree(rule, &mut tensors, false, mesh, &[], |_| agree::Direction::Both).contains(&true) {}
    let layout = |tensor: usize| match &op.layouts[tensor] {
        Some(given) => given.clone(),
        None => project::layout(rule, tensor, &tensors[tensor]),
    };
    let layouts: Vec<Specs> = all.clone().map(layout).collect();
    let closed: Vec<_> = all.map(|tensor| project::project(rule, tensor, Some(&layouts[tensor]), true)).collect();
    let sizes: Vec<i64> =
        op.shapes.iter().map(|shape| shape.iter().fold(1_i64, |n, size| n.saturating_mul(*size))).collect();
    let cuts = meet::meet(rule, &closed, &sizes, mesh);
    Settled::new(rule, cuts, layouts)
}

/// The cuts with which JAX's explicit mode computes a product of operands that are cut so: a factor is cut as in the first operand
/// that has it.
pub(super) fn product(rule: &Rule, operands: &[project::Tensor]) -> std::result::Result<meet::Cuts, Conflict> {
    let cut_in = |factor: usize| {
        let tensors = operands.iter().enumerate();
        tensors.filter_map(move |(tensor, cuts)| Some((tensor, &cuts[factor].as_ref()?.axes)))
    };
    let of_kind = |kind| (0..rule.factors().len()).filter(move |factor| rule.factors()[*factor].kind == kind);
    for factor in of_kind(Kind::Pass).chain(of_kind(Kind::Sum)) {
        let mut cut = cut_in(factor).filter(|(_, axes)| !axes.is_empty());
        if let Some((first, axes)) = cut.next()
            && let Some((other, _)) = cut.find(|(_, other)| *other != axes)
        {
            return Err(Conflict::Differ { factor, operands: [first, other] });
        }
    }
    for factor in of_kind(Kind::Sum) {
        if cut_in(factor).filter(|(_, axes)| !axes.is_empty()).count() > 1 {
            return Err(Conflict::Ambiguous { factor });
        }
    }
    let cuts = |factor| cut_in(factor).next().map(|(_, axes)| axes.clone()).unwrap_or_default();
    Ok((0..rule.factors().len()).map(cuts).collect())
}

/// The layouts with those of the results that JAX's explicit mode gives a product of one or two operands.
fn explicit(op: Op<'_>) -> std::result::Result<Vec<Option<Specs>>, Conflict> {
    let rule = op.rule;
    let operands = rule.operands();
    if let Some(operand) = (0..operands).find(|operand| op.layouts[*operand].is_none()) {
        return Err(Conflict::Open { operand });
    }
    if op.layouts[operands..].iter().all(Option::is_some) {
        return Ok(op.layouts.to_vec());
    }
    let of = |tensor: usize| project::project(rule, tensor, op.layouts[tensor].as_ref(), true);
    let cuts = product(rule, &(0..operands).map(of).collect::<Vec<_>>())?;
    let mut layouts = op.layouts.to_vec();
    for (result, layout) in layouts.iter_mut().enumerate().skip(operands) {
        let held: Vec<usize> =
            (0..rule.rank(result)).flat_map(|dim| rule.dim(result, dim)).map(|factor| *factor as usize).collect();
        for (at, &factor) in held.iter().enumerate() {
            if let Some(other) = held[..at].iter().find(|other| axes::any_overlap(&cuts[**other], &cuts[factor])) {
                return Err(Conflict::Twice { factors: [*other, factor] });
            }
        }
        if layout.is_none() {
            *layout = Some(of_cuts(rule, result, &cuts));
        }
    }
    Ok(layouts)
}
