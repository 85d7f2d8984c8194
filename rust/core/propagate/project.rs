//! Layouts as cuts of the factors of a rule, and back.

use super::axes;
use crate::{factor::rule::Rule, radix, sub_axis::SubAxis};

/// The axes of each dim of a tensor, major first.
pub type Specs = Vec<Vec<SubAxis>>;

/// True for a layout that cuts nothing, and for none.
pub(crate) fn is_whole(specs: Option<&Specs>) -> bool {
    specs.is_none_or(|specs| specs.iter().all(Vec::is_empty))
}

/// The cut of a factor in one tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) axes: Vec<SubAxis>,
    /// The axes of the dim that fit no whole factor from here on.
    pub(crate) overflow: Vec<SubAxis>,
    /// True if no more axes may be added.
    pub(crate) closed: bool,
    /// True if it is the last factor of its dim.
    pub(crate) minor: bool,
}

/// The cut of each factor that a tensor has.
pub(crate) type Tensor = Vec<Option<Cut>>;

/// The cuts of the factors of a tensor with this layout; one without a layout is open for any.
pub(crate) fn project(rule: &Rule, tensor: usize, specs: Option<&Specs>, closed: bool) -> Tensor {
    project_closed(rule, tensor, specs, &vec![closed; rule.rank(tensor)])
}

/// The same where some dims may take more axes.
pub(crate) fn project_closed(rule: &Rule, tensor: usize, specs: Option<&Specs>, closed: &[bool]) -> Tensor {
    let mut cuts: Tensor = vec![None; rule.factors().len()];
    for dim in 0..rule.rank(tensor) {
        let given: &[SubAxis] = specs.map_or(&[], |specs| &specs[dim]);
        // The axis that is next, or what is left of it.
        let mut rest = given.iter().copied();
        let mut next = rest.next();
        let mut over = false;
        let factors = rule.dim(tensor, dim);
        for (at, number) in factors.iter().enumerate() {
            let cut = cuts[*number as usize].insert(Cut::default());
            cut.minor = at + 1 == factors.len();
            if over {
                cut.closed = true;
                break;
            }
            cut.closed = closed[dim];
            if cut.minor {
                next.into_iter().chain(rest).for_each(|axis| axes::push(&mut cut.axes, axis));
                break;
            }
            let mut left = rule.factors()[*number as usize].size;
            while let Some(axis) = next {
                let common = radix::gcd(left, axis.size);
                if axis.size > 1 && common == 1 {
                    break;
                }
                if axis.size > common {
                    cut.axes.push(SubAxis { size: common, ..axis });
                    next = Some(SubAxis { before: axis.before * common, size: axis.size / common, ..axis });
                    left /= common;
                } else {
                    cut.axes.push(axis);
                    left /= axis.size;
                    next = rest.next();
                }
            }
            if left > 1 && next.is_some() {
                over = true;
                next.into_iter().chain(rest.by_ref()).for_each(|axis| axes::push(&mut cut.overflow, axis));
            }
        }
    }
    cuts
}

/// The cuts of the factors of each tensor, of these layouts, which take no more axes.
pub(crate) fn closed<'a>(rule: &Rule, layouts: impl Iterator<Item = Option<&'a Specs>>) -> Vec<Tensor> {
    layouts.enumerate().map(|(tensor, specs)| project(rule, tensor, specs, true)).collect()
}

/// Leaves out the cuts of factors behind one of their dim that is not cut as a whole, of which a device would have elements that
/// are not one after the other.
pub(crate) fn in_one_piece(rule: &Rule, cuts: &mut [Vec<SubAxis>]) {
    loop {
        let mut changed = false;
        for tensor in 0..rule.tensors() {
            for pair in rule.dims(tensor).flat_map(|dim| dim.windows(2)) {
                let [first, second] = [pair[0] as usize, pair[1] as usize];
                if axes::shards(&cuts[first]) < rule.factors()[first].size && !cuts[second].is_empty() {
                    cuts[second].clear();
                    changed = true;
                }
            }
        }
        if !changed {
            return;
        }
    }
}

/// The layout of a tensor of an op that computes with these cuts.
pub(crate) fn of_cuts(rule: &Rule, tensor: usize, cuts: &[Vec<SubAxis>]) -> Specs {
    let cut = |axes: &Vec<SubAxis>| Some(Cut { axes: axes.clone(), ..Cut::default() });
    layout(rule, tensor, &cuts.iter().map(cut).collect())
}

/// The layout of a tensor whose factors are cut so.
pub(crate) fn layout(rule: &Rule, tensor: usize, cuts: &Tensor) -> Specs {
    layout_and_closed(rule, tensor, cuts).0
}

/// The layout of a tensor whose factors are cut so, and which of its dims take no more axes.
pub(crate) fn layout_and_closed(rule: &Rule, tensor: usize, cuts: &Tensor) -> (Specs, Vec<bool>) {
    let of_dim = |dim: usize| {
        let mut spec = Vec::new();
        let mut closed = false;
        for number in rule.dim(tensor, dim) {
            let Some(cut) = &cuts[*number as usize] else { break };
            closed |= cut.closed;
            for list in [&cut.axes, &cut.overflow] {
                if let Some((first, others)) = list.split_first() {
                    axes::push(&mut spec, *first);
                    spec.extend(others);
                }
            }
            if !cut.overflow.is_empty() || axes::shards(&cut.axes) < rule.factors()[*number as usize].size {
                break;
            }
        }
        (spec, closed)
    };
    (0..rule.rank(tensor)).map(of_dim).unzip()
}
