//! The steps of each holder in a plan, in their order (rule 2.11).
//!
//! A *participant* is a holder of the source, of the destination, or of both; those of the source come first, in their
//! order, then those of the destination that are no source holders. Everything that a plan does is a step between two
//! participants, or of one with itself, and the steps have one order for all:
//!
//! 1. by addend: the first addend of all boxes, then the second, …, so that all replicas add in one order;
//! 2. what stays with its holder before what is sent;
//! 3. by turn: what goes from participant `p` to `q` is in turn `(q - p) mod n`. In a turn each participant sends to one
//!    other and receives from one other;
//! 4. by the number of the transfer.
//!
//! Each participant does its own steps in this order. Then nobody waits in a circle, even where a send waits for its
//! receive: of all steps that are not done, the first in the order has both its ends waiting for nothing else.

use crate::{
    error::{Error, Result},
    plan::Plan,
    room,
    tiling::{Poll, tiles::Ticker},
};

/// The kind of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A box goes from the participant's source array to its destination array.
    Copy,
    /// A box goes from the participant's source array to another participant.
    Send,
    /// A box comes from another participant to the participant's destination array.
    Receive,
}

/// One step of a participant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The kind of the step.
    pub kind: Kind,
    /// The other participant; itself, if it is a copy.
    pub peer: i64,
    /// The number of the transfer, or of the box that stays.
    pub number: usize,
    /// The number of the addend of partial sums: the first is written, the others are added.
    pub addend: i64,
}

/// The steps of all participants.
#[derive(Debug)]
pub struct Programs {
    /// The participant that each holder of the destination is.
    destination: Vec<i64>,
    /// The holder of the destination that each participant is, or -1.
    holders: Vec<i64>,
    participants: i64,
    /// All steps in their order: sender, receiver, addend, and the number, or its complement if the box stays.
    order: Vec<(u32, u32, i64, i64)>,
    /// The start of each participant's steps in `own`, and for each its places in the order.
    begins: Vec<usize>,
    own: Vec<u32>,
}

impl Programs {
    /// The programs of a plan; `same` is what the plan was made with.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for the steps; what `poll` returns.
    pub fn new(plan: &Plan, poll: Poll<'_>) -> Result<Self> {
        let what = "the steps of a plan";
        let sources = plan.source().holders();
        let mut participants = sources;
        let mut destination = room::list(plan.same().len(), what)?;
        for &twin in plan.same() {
            destination.push(if twin >= 0 { twin } else { participants });
            participants += i64::from(twin < 0);
        }
        if u32::try_from(participants).is_err() || u32::try_from(plan.transfers() + plan.kept()).is_err() {
            return Err(room::none(format_args!("the steps of {participants} participants")));
        }
        let mut holders = room::filled(-1, participants as usize, what)?;
        destination.iter().enumerate().for_each(|(holder, &own)| holders[own as usize] = holder as i64);
        let mut order = room::list(plan.transfers() + plan.kept(), what)?;
        let all = 0..plan.same().len();
        plan.visit_kept(all.clone(), |kept| {
            let own = destination[kept.destination as usize] as u32;
            order.push((own, own, plan.addend_of(kept.source), !(order.len() as i64)));
            Ok(())
        })?;
        let mut number = 0;
        plan.visit_transfers(all, poll, |moved| {
            let to = destination[moved.destination as usize] as u32;
            order.push((moved.source as u32, to, plan.addend_of(moved.source), number));
            number += 1;
            Ok(())
        })?;
        poll()?;
        let turn = |&(from, to, ..): &(u32, u32, i64, i64)| (i64::from(to) - i64::from(from)).rem_euclid(participants);
        order.sort_unstable_by_key(|step| (step.2, step.3 >= 0, turn(step), if step.3 < 0 { !step.3 } else { step.3 }));
        poll()?;
        let (begins, own) = by_participant(&order, participants as usize, poll)?;
        Ok(Self { destination, holders, participants, order, begins, own })
    }

    /// The number of participants.
    #[must_use]
    pub fn participants(&self) -> i64 {
        self.participants
    }

    /// The participant that a holder of the destination is.
    #[must_use]
    pub fn of_destination(&self, holder: usize) -> i64 {
        self.destination[holder]
    }

    /// The steps of a holder that is number `source` of the source and `destination` of the destination, or -1. Peers are
    /// numbers of the destination in sends, of the source else.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such holder.
    pub fn steps_of(&self, source: i64, destination: i64) -> Result<Vec<Step>> {
        let limit = self.destination.len() as i64;
        let known = |what, value, limit| Err(Error::OutOfRange { what, position: None, value, limit });
        if destination >= limit {
            return known("destination", destination, limit);
        }
        let participant = if destination >= 0 { self.destination[destination as usize] } else { source };
        if participant < 0 || participant >= self.participants || (source >= 0 && source != participant) {
            return known("source", source, self.participants);
        }
        let mut steps: Vec<Step> = self.steps(participant as usize).collect();
        for step in steps.iter_mut().filter(|step| step.kind == Kind::Send) {
            step.peer = self.holders[step.peer as usize];
        }
        Ok(steps)
    }

    /// The steps of a participant, in order.
    pub fn steps(&self, participant: usize) -> impl ExactSizeIterator<Item = Step> {
        self.own[self.begins[participant]..self.begins[participant + 1]].iter().map(move |&place| {
            let (from, to, addend, number) = self.order[place as usize];
            let sends = from as usize == participant;
            let (kind, peer) = match (number < 0, sends) {
                (true, _) => (Kind::Copy, from),
                (false, true) => (Kind::Send, to),
                (false, false) => (Kind::Receive, from),
            };
            let number = if number < 0 { !number } else { number } as usize;
            Step { kind, peer: i64::from(peer), number, addend }
        })
    }
}

/// The start of each participant's steps, and their places in the order.
fn by_participant(
    order: &[(u32, u32, i64, i64)],
    participants: usize,
    poll: Poll<'_>,
) -> Result<(Vec<usize>, Vec<u32>)> {
    let what = "the steps of the participants";
    let ends = |step: &(u32, u32, i64, i64)| [Some(step.0), Some(step.1).filter(|&to| to != step.0)];
    let mut begins: Vec<usize> = room::filled(0, participants + 1, what)?;
    order.iter().flat_map(ends).flatten().for_each(|participant| begins[participant as usize + 1] += 1);
    for participant in 0..participants {
        begins[participant + 1] += begins[participant];
    }
    let mut own: Vec<u32> = room::filled(0, begins[participants], what)?;
    let mut next = begins.clone();
    let mut ticker = Ticker::new();
    for (place, step) in order.iter().enumerate() {
        ticker.tick(poll)?;
        for participant in ends(step).into_iter().flatten() {
            own[next[participant as usize]] = place as u32;
            next[participant as usize] += 1;
        }
    }
    Ok((begins, own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        parallel::never,
        plan::Transfer,
        tiling::{
            grid::Grid,
            tests::{seeds, shapes, tiling_of},
        },
    };
    use proptest::prelude::*;
    use std::{collections::HashMap, sync::Arc};

    /// Rows of one holder each to columns of one holder each: in turn `t` holder `h` sends to `h + t`.
    #[test]
    fn in_a_turn_each_sends_to_one_and_receives_from_one() {
        for holders in 2..8_i64 {
            let cut = |chunks| Arc::new(Grid::new(&[holders; 2], chunks, false).unwrap());
            let (rows, columns) = (cut(&[1, holders]), cut(&[holders, 1]));
            let plan = Plan::new(rows, columns, (0..holders).collect(), &mut never).unwrap();
            let programs = Programs::new(&plan, &mut never).unwrap();
            for holder in 0..holders {
                let peers = |kind| {
                    let steps = programs.steps(holder as usize).filter(move |step| step.kind == kind);
                    steps.map(|step| step.peer).collect::<Vec<_>>()
                };
                let turns =
                    |sign: i64| (1..holders).map(|t| (holder + sign * t).rem_euclid(holders)).collect::<Vec<_>>();
                assert_eq!((peers(Kind::Send), peers(Kind::Receive)), (turns(1), turns(-1)));
            }
        }
    }

    proptest! {
        /// Sends wait for their receives here, so a circle of waiting would stop the run.
        #[test]
        fn every_box_is_carried_once_and_nobody_waits_in_a_circle(
            shape in shapes(),
            kinds in (0..6_usize, 0..6_usize),
            from in seeds(),
            to in seeds(),
            shift in 0..9_i64,
            choices in prop::collection::vec(0..100_usize, 40),
        ) {
            let (source, destination) = (tiling_of(&shape, kinds.0, &from), tiling_of(&shape, kinds.1, &to));
            let twin = |d: i64| if d + shift < source.holders() { d + shift } else { -1 };
            let same: Vec<i64> = (0..destination.holders()).map(twin).collect();
            let plan = Plan::new(source, destination, same, &mut never).unwrap();
            let programs = Programs::new(&plan, &mut never).unwrap();
            let all: Vec<Vec<Step>> =
                (0..programs.participants() as usize).map(|p| programs.steps(p).collect()).collect();
            let mut at = vec![0; all.len()];
            let mut carried: HashMap<usize, (i64, i64)> = HashMap::new();
            let mut copies = 0;
            for turn in 0.. {
                // Every holder that can go on; a send and its receive together.
                let mut ready = Vec::new();
                for (p, steps) in all.iter().enumerate() {
                    let Some(step) = steps.get(at[p]) else { continue };
                    let met = || all[step.peer as usize].get(at[step.peer as usize]).is_some_and(|other| {
                        (other.kind, other.number, other.peer) == (Kind::Receive, step.number, p as i64)
                    });
                    if step.kind == Kind::Copy || (step.kind == Kind::Send && met()) {
                        ready.push((p, *step));
                    }
                }
                let Some(&(p, step)) = ready.get(choices[turn % choices.len()] % ready.len().max(1)) else { break };
                at[p] += 1;
                if step.kind == Kind::Copy {
                    copies += 1;
                } else {
                    at[step.peer as usize] += 1;
                    prop_assert!(carried.insert(step.number, (p as i64, step.peer)).is_none());
                }
            }
            prop_assert!(all.iter().zip(&at).all(|(steps, &at)| steps.len() == at), "some wait for ever");
            prop_assert_eq!((copies, carried.len()), (plan.kept(), plan.transfers()));
            let rows = plan.transfer_rows(&mut never).unwrap();
            for (number, row) in rows.chunks(plan.row()).enumerate() {
                let transfer = Transfer::of_row(row);
                let receiver = programs.of_destination(transfer.destination as usize);
                prop_assert_eq!(carried[&number], (transfer.source, receiver));
            }
        }
    }
}
