//! The cheapest sequence with one permute: forwards from the start, backwards from the goal, and a permute where the two
//! meet.
//!
//! A permute carries any layout to any other with as many shards along every dim. So before it, and after it, it does
//! not matter which of two factors of equal size and links is which.

use std::collections::HashMap;

use super::{
    bound::Bound,
    change::Change,
    explore::{Cost, Explorer, FEW_FACTORS, STATES},
    moves::Moves,
};
use crate::{
    collective::kinds::{Collective, State, permute},
    error::Result,
    tiling::Poll,
};

/// Layouts after the permute that are kept for each number of shards.
const KEPT: usize = 256;

/// The cheapest sequence below `most`, if one is found.
pub(super) fn cheapest(
    change: &Change,
    bound: &Bound,
    mut most: Cost,
    poll: Poll<'_>,
) -> Result<Option<Vec<Collective>>> {
    let Change { tensor, start, scale, .. } = change;
    let few = tensor.sizes.len() <= FEW_FACTORS;
    let moves = Moves::new(tensor, |_| !few);
    let (after, by_shards) = after_the_permute(change, &moves, bound, most, poll)?;
    let key = |state: &_| moves.key(state);
    let mut before = Explorer::new(start.clone(), key(start));
    let mut found = None;
    let mut visited = 0;
    while let Some((number, at_least)) = before.next(key) {
        visited += 1;
        if at_least >= most || visited > STATES {
            break;
        }
        if visited % 64 == 0 {
            poll()?;
        }
        let (state, cost) = (before.nodes[number].state.clone(), before.nodes[number].cost);
        let meets = by_shards.get(&tensor.shards(&state)).filter(|_| state.unreduced.is_empty());
        for &other in meets.into_iter().flatten() {
            let then = &after.nodes[other];
            let least = scale.sum(then.cost, cost.seconds, cost.steps);
            if least >= most {
                continue;
            }
            let step = (state != then.state).then(|| permute(&state, then.state.clone(), tensor.sizes.len()));
            let (seconds, steps) = step.as_ref().map_or((0.0, 0), |step| (tensor.seconds(&state, step), 1));
            let total = scale.sum(least, seconds, steps);
            if total < most {
                (most, found) = (total, Some((number, step, other)));
            }
        }
        for step in moves.from(&state, None) {
            let total = scale.sum(cost, tensor.seconds(&state, &step), 1);
            let rest = bound.permuted(tensor, &step.after);
            let at_least = scale.sum(total, rest.seconds, rest.steps);
            if at_least < most {
                let next = step.after.clone();
                let key = key(&next);
                before.offer(next, key, total, at_least, Some((number, step)));
            }
        }
    }
    Ok(found.map(|(number, step, other)| {
        let mut steps = before.steps_back(number);
        steps.reverse();
        steps.extend(step);
        // These are from the goal back, so the last is the first to be made.
        steps.extend(after.steps_back(other));
        steps
    }))
}

type States = Explorer<State, State>;

/// Nodes by the number of shards along each dim.
type ByShards = HashMap<Vec<i64>, Vec<usize>>;

/// The layouts from which the goal is reached without a permute, and their nodes by the number of shards.
fn after_the_permute(
    change: &Change,
    moves: &Moves<'_>,
    bound: &Bound,
    most: Cost,
    poll: Poll<'_>,
) -> Result<(States, ByShards)> {
    let Change { tensor, goal, scale, .. } = change;
    let key = |state: &_| moves.key(state);
    let mut explorer = Explorer::new(goal.clone(), key(goal));
    let mut by_shards = ByShards::new();
    let mut visited = 0;
    while let Some((number, at_least)) = explorer.next(key) {
        visited += 1;
        if at_least >= most || visited > STATES {
            break;
        }
        if visited % 64 == 0 {
            poll()?;
        }
        let (state, cost) = (explorer.nodes[number].state.clone(), explorer.nodes[number].cost);
        let kept = by_shards.entry(tensor.shards(&state)).or_default();
        if kept.len() < KEPT {
            kept.push(number);
        }
        for (before, step) in moves.to(&state) {
            let total = scale.sum(cost, tensor.seconds(&before, &step), 1);
            let rest = bound.permuted_before(tensor, &before);
            let at_least = scale.sum(total, rest.seconds, rest.steps);
            if at_least < most {
                let key = key(&before);
                explorer.offer(before, key, total, at_least, Some((number, step)));
            }
        }
    }
    Ok((explorer, by_shards))
}
