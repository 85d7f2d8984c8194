//! An op settled: how it computes, by each policy.

use super::{
    agree, least, meet,
    op::{Op, Policy, Settled, Specs},
    project,
};
use crate::error::Result;

/// Settles how the op computes with these layouts, by a policy; none if no way leaves addends over the axes that are to stay.
/// [`Policy::Explicit`] takes all layouts as they are, and the fewest bytes.
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
/// assert_eq!(settle(op, Policy::Shardy)?.unwrap().layouts[2], [[dp], [tp]]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn settle(op: Op<'_>, policy: Policy) -> Result<Option<Settled>> {
    if policy != Policy::Shardy {
        return least::settle(op);
    }
    let found = shardy(op);
    Ok(op.kept.iter().all(|axis| found.summed.contains(axis)).then_some(found))
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
