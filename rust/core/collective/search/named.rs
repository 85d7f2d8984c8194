//! The cheapest sequence without a permute: A* over layouts.

use super::{
    bound::Bound,
    change::Change,
    explore::{Cost, Explorer, FEW_FACTORS, STATES},
    moves::Moves,
};
use crate::{
    collective::kinds::{Collective, Role},
    error::Result,
    tiling::Poll,
};

/// The cheapest sequence below `most`, if one is found.
pub(super) fn cheapest(change: &Change, bound: &Bound, most: Cost, poll: Poll<'_>) -> Result<Option<Vec<Collective>>> {
    let Change { tensor, start, goal, scale, .. } = change;
    // What replicates in the end has no place of its own to come to.
    let few = tensor.sizes.len() <= FEW_FACTORS;
    let moves =
        Moves::new(tensor, |factor| !few && goal.role(factor) == Role::Replicates && replaceable(change, factor));
    let key = |state: &_| moves.key(state);
    let mut explorer = Explorer::new(start.clone(), key(start));
    let mut visited = 0;
    while let Some((number, at_least)) = explorer.next(key) {
        if at_least >= most {
            return Ok(None);
        }
        let (state, cost) = (explorer.nodes[number].state.clone(), explorer.nodes[number].cost);
        if state == *goal {
            let mut steps = explorer.steps_back(number);
            steps.reverse();
            return Ok(Some(steps));
        }
        visited += 1;
        if visited > STATES {
            return Ok(None);
        }
        if visited % 64 == 0 {
            poll()?;
        }
        for step in moves.from(&state, Some(goal)) {
            let total = scale.sum(cost, tensor.seconds(&state, &step), 1);
            let rest = bound.named(tensor, &step.after);
            let at_least = scale.sum(total, rest.seconds, rest.steps);
            if at_least < most {
                let after = step.after.clone();
                let key = key(&after);
                explorer.offer(after, key, total, at_least, Some((number, step)));
            }
        }
    }
    Ok(None)
}

/// True if the start says nothing of a factor either.
fn replaceable(change: &Change, factor: usize) -> bool {
    change.start.role(factor) == Role::Replicates
}
