//! The change from one layout to another that is searched for, the cost of a sequence that makes
//! it, and its words.

use super::{
    super::{
        cost::{Links, Step, Tensor},
        kinds::{Collective, Kind, State, all_gather, all_reduce, slice},
        views::Views,
    },
    explore::{Cost, Scale},
};
use crate::partition::Partition;

/// Dims that are looked at; others only if one of the layouts cuts them.
const DIMS: usize = 6;

/// A sequence of collectives, and the sub-axes that they are along.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// The common sub-axes of the meshes, cut as finely as the steps need.
    pub views: Views,
    /// The steps.
    pub steps: Vec<Step>,
}

/// The change that is searched for: its start and its goal, over the dims that matter.
pub(super) struct Change {
    pub(super) views: Views,
    pub(super) tensor: Tensor,
    /// The dims that are looked at.
    pub(super) dims: Vec<usize>,
    pub(super) start: State,
    pub(super) goal: State,
    pub(super) scale: Scale,
}

impl Change {
    pub(super) fn new(views: &Views, source: &Partition, destination: &Partition, itemsize: i64, links: Links) -> Self {
        let (from, unreduced) = views.of_source(source.layout());
        let (to, _) = views.of_destination(destination.layout());
        let shape = source.shape();
        let cut: Vec<bool> = from.iter().zip(&to).map(|(a, b)| !a.is_empty() || !b.is_empty()).collect();
        let mut room = DIMS.saturating_sub(cut.iter().filter(|&&cut| cut).count());
        let mut looked_at = |dim: usize| {
            let spare = !cut[dim] && shape[dim] > 1 && room > 0;
            room -= usize::from(spare);
            cut[dim] || spare
        };
        let dims: Vec<usize> = (0..shape.len()).filter(|&dim| looked_at(dim)).collect();
        let others = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]);
        let itemsize = others.fold(itemsize, i64::saturating_mul);
        let only = |specs: Vec<Vec<usize>>| dims.iter().map(|&dim| specs[dim].clone()).collect::<Vec<_>>();
        let shape: Vec<i64> = dims.iter().map(|&dim| shape[dim]).collect();
        let tensor = Tensor::new(views, &shape, itemsize, links);
        let (start, goal) = (State { specs: only(from), unreduced }, State { specs: only(to), unreduced: Vec::new() });
        let mut change = Self { views: views.clone(), tensor, dims, start, goal, scale: Scale::default() };
        let always = change.by_way_of_replication();
        change.scale = Scale::of(change.seconds(&always));
        change
    }

    fn seconds(&self, steps: &[Collective]) -> f64 {
        let before = std::iter::once(&self.start).chain(steps.iter().map(|step| &step.after));
        before.zip(steps).map(|(before, step)| self.tensor.seconds(before, step)).sum()
    }

    pub(super) fn cost(&self, steps: &[Collective]) -> Cost {
        self.scale.cost(self.seconds(steps), steps.len())
    }

    /// The sequence that always works: reduce all, gather all, slice.
    pub(super) fn by_way_of_replication(&self) -> Vec<Collective> {
        let (mut steps, mut state) = (Vec::new(), self.start.clone());
        let mut add = |step: Collective, state: &mut State| {
            *state = step.after.clone();
            steps.push(step);
        };
        if !state.unreduced.is_empty() {
            add(all_reduce(&state, &state.unreduced), &mut state);
        }
        for dim in 0..state.specs.len() {
            let count = state.specs[dim].len();
            if count > 0 {
                add(all_gather(&state, dim, count), &mut state);
            }
        }
        for (dim, spec) in self.goal.specs.iter().enumerate().filter(|(_, spec)| !spec.is_empty()) {
            add(slice(&state, spec, dim), &mut state);
        }
        steps
    }

    /// The steps with their prices, neighbours of one kind made one where that costs no more.
    fn priced(&self, collectives: Vec<Collective>) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::with_capacity(collectives.len());
        // The state before the last step, and the one after it.
        let (mut earlier, mut before) = (self.start.clone(), self.start.clone());
        for next in collectives {
            let step = self.tensor.priced(&before, next);
            let merged = steps.last().filter(|last| mergeable(&last.collective, &step.collective)).map(|last| {
                let (one, other) = (&last.collective, &step.collective);
                // Gathering takes the minor axis first; in the step's axes the major one stands first.
                let (major, minor) = if other.kind == Kind::AllGather { (other, one) } else { (one, other) };
                let axes = [&major.axes[..], &minor.axes[..]].concat();
                let both = self.tensor.priced(&earlier, Collective { axes, ..other.clone() });
                (both, last.seconds + step.seconds)
            });
            before = step.collective.after.clone();
            match (merged, steps.last_mut()) {
                // As good as equal is equal: the sums are rounded.
                (Some((both, apart)), Some(last)) if both.seconds <= apart * (1.0 + 1e-9) => *last = both,
                (_, last) => {
                    if let Some(last) = last {
                        earlier = last.collective.after.clone();
                    }
                    steps.push(step);
                }
            }
        }
        steps
    }

    /// The answer, over all dims.
    pub(super) fn finished(
        &self,
        collectives: Vec<Collective>,
        source: &Partition,
        destination: &Partition,
    ) -> Sequence {
        let rank = source.shape().len();
        debug_assert_eq!(rank, destination.shape().len());
        let mut steps = self.priced(collectives);
        for Step { collective, .. } in &mut steps {
            let mut specs = vec![Vec::new(); rank];
            for (&dim, spec) in self.dims.iter().zip(std::mem::take(&mut collective.after.specs)) {
                specs[dim] = spec;
            }
            collective.after.specs = specs;
            for dim in [&mut collective.from_dim, &mut collective.to_dim] {
                *dim = dim.map(|dim| self.dims[dim]);
            }
        }
        Sequence { views: self.views.clone(), steps }
    }
}

fn mergeable(a: &Collective, b: &Collective) -> bool {
    let kinds = [Kind::Slice, Kind::AllGather, Kind::ReduceScatter];
    a.kind == b.kind && kinds.contains(&a.kind) && (a.from_dim, a.to_dim) == (b.from_dim, b.to_dim)
}
