//! Lists of axes and sub-axes, major first: which begins which, and which share a part of an axis.

use crate::{mesh::Mesh, short, sub_axis::SubAxis};

/// The relation of one list to the beginning of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prefix {
    Equal,
    Strict,
    Not,
}

fn next(axis: SubAxis) -> i64 {
    axis.before * axis.size
}

fn overlap(a: SubAxis, b: SubAxis) -> bool {
    a.axis == b.axis && (a == b || (a.before < next(b) && b.before < next(a)))
}

/// Says whether parts of one axis have a common refinement.
fn coexist(a: SubAxis, b: SubAxis, mesh: &Mesh) -> bool {
    let whole = |part: SubAxis| part.size == mesh.sizes()[part.axis];
    if a.axis != b.axis || whole(a) || whole(b) {
        return true;
    }
    let (first, last) = (a.before.min(b.before), a.before.max(b.before));
    let (least, most) = (next(a).min(next(b)), next(a).max(next(b)));
    if least > last { least % last == 0 && last % first == 0 && most % least == 0 } else { last % least == 0 }
}

/// Says whether `part` is the major part of `axis`, or all of it.
fn begins(part: SubAxis, axis: SubAxis) -> bool {
    part.axis == axis.axis && part.before == axis.before && axis.size % part.size == 0
}

pub(crate) fn contains(axis: SubAxis, part: SubAxis) -> bool {
    axis.axis == part.axis && axis.before <= part.before && next(part) <= next(axis)
}

/// The major part of `axis` that shares nothing with `others`.
#[inline]
pub(crate) fn free_part(axis: SubAxis, others: &[SubAxis], mesh: &Mesh) -> Option<SubAxis> {
    others.iter().try_fold(axis, |axis, other| {
        if !coexist(axis, *other, mesh) {
            None
        } else if !overlap(axis, *other) {
            Some(axis)
        } else if axis.before >= other.before {
            None
        } else {
            Some(SubAxis { size: other.before / axis.before, ..axis })
        }
    })
}

/// Cuts the list off where it shares something with `others`; whether that took anything away.
#[inline]
pub(crate) fn cut_off(axes: &mut Vec<SubAxis>, others: &[SubAxis], mesh: &Mesh) -> bool {
    for at in 0..axes.len() {
        let free = free_part(axes[at], others, mesh);
        if free != Some(axes[at]) {
            axes.truncate(at);
            axes.extend(free);
            return true;
        }
    }
    false
}

pub(crate) fn any_overlap(axes: &[SubAxis], others: &[SubAxis]) -> bool {
    axes.iter().any(|axis| others.iter().any(|other| overlap(*axis, *other)))
}

/// The first axis that cuts dims twice, or shares a part with one before it, and the dims of both.
pub(crate) fn repeated(specs: &[Vec<SubAxis>]) -> Option<(usize, usize, SubAxis)> {
    let of_dim = |(dim, spec): (usize, &Vec<SubAxis>)| spec.iter().map(|axis| (dim, *axis)).collect::<Vec<_>>();
    let all: Vec<(usize, SubAxis)> = specs.iter().enumerate().flat_map(of_dim).collect();
    all.iter().enumerate().find_map(|(at, (dim, axis))| {
        let (first, _) = all[..at].iter().find(|(_, other)| overlap(*axis, *other))?;
        Some((*first, *dim, *axis))
    })
}

#[inline]
pub(crate) fn prefix(first: &[SubAxis], second: &[SubAxis]) -> Prefix {
    if first == second {
        return Prefix::Equal;
    }
    let Some((last, before)) = first.split_last() else { return Prefix::Strict };
    let same = first.len() <= second.len() && before == &second[..before.len()];
    if same && begins(*last, second[before.len()]) { Prefix::Strict } else { Prefix::Not }
}

/// The beginning that two lists have in common, with the common beginning of the axes where they part.
pub(crate) fn common(first: &[SubAxis], second: &[SubAxis], mesh: &Mesh) -> Vec<SubAxis> {
    let same = first.iter().zip(second).take_while(|(a, b)| a == b).count();
    let mut found = first[..same].to_vec();
    if let (Some(a), Some(b)) = (first.get(same), second.get(same))
        && (a.axis, a.before) == (b.axis, b.before)
        && coexist(*a, *b, mesh)
    {
        found.push(if a.size < b.size { *a } else { *b });
    }
    found
}

/// The number of shards that the axes make.
pub(crate) fn shards(axes: &[SubAxis]) -> i64 {
    axes.iter().fold(1, |product, axis| product.saturating_mul(axis.size))
}

/// Adds an axis, as one with the last if it is the next part of the same.
#[inline]
pub(crate) fn push(axes: &mut Vec<SubAxis>, axis: SubAxis) {
    match axes.last_mut() {
        Some(last) if last.axis == axis.axis && next(*last) == axis.before && axis.size > 1 => last.size *= axis.size,
        _ => axes.push(axis),
    }
}

/// The axes in the order of the mesh, the parts of one as one where they follow one another.
pub(crate) fn sorted(mut axes: Vec<SubAxis>) -> Vec<SubAxis> {
    short::sort_by_key(&mut axes, |axis| (axis.axis, axis.before));
    let mut found = Vec::new();
    for axis in axes {
        push(&mut found, axis);
    }
    found
}

/// The order of lists of equal weight: by length, then by name.
pub(crate) fn order(a: &[SubAxis], b: &[SubAxis], mesh: &Mesh) -> std::cmp::Ordering {
    let key = |axis: &SubAxis| {
        let whole = axis.size == mesh.sizes()[axis.axis];
        // A whole axis goes before its parts, except for those at its beginning.
        (&mesh.names()[axis.axis], axis.before, if whole { i64::MAX } else { axis.size })
    };
    a.len().cmp(&b.len()).then_with(|| a.iter().map(key).cmp(b.iter().map(key)))
}
