//! The plans of many tensors with one balance over all.
//!
//! Planned one by one, tensors would all be sent by the first replicas: 80 replicated norms by replica 0. Here each
//! transfer goes to the replica that has sent the fewest bytes so far, of whatever tensor; what has one holder only counts
//! first, then the largest tensors. Of replicas that are nearly alike, the one sends whose node has sent the fewest bytes
//! to the receiver's. What tensors of one shape between the same two tilings have in common is found once:
//! see [`Sort`].

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use crate::{
    error::{Error, Result},
    plan::listed::walk,
    room::{self, Room as _},
    tiling::{Poll, Tiling, tiles::Ticker},
};

/// The list that there may be no room for here.
const TRANSFERS: &str = "the transfers of a model";

/// The most replicas that are compared one by one.
const FEW: usize = 24;

/// The transfers between two tilings, whatever the dtype.
#[derive(Debug, Default)]
pub struct Sort {
    /// For each transfer, in the order of a plan's: its box among `choices`, the participant that receives it, and its
    /// elements.
    transfers: Vec<(u32, u32, i64)>,
    /// For each box and addend those who hold it: the number of the source holder, and of the participant that it is.
    choices: Vec<Vec<(u32, u32)>>,
    /// True if each box has one holder only.
    is_plain: bool,
    /// The elements that participants receive, and keep.
    received: Vec<(u32, i64)>,
    kept: Vec<(u32, i64)>,
}

impl Sort {
    /// The transfers from `source` to `destination`. `from[h]` is the participant that holder `h`
    /// of the source is, `to[h]` the same of the destination; `same` as in [`super::Plan::new`].
    ///
    /// # Errors
    /// As [`super::Plan::new`]; [`Error::Length`] if a holder has no participant.
    pub fn new(
        source: &dyn Tiling,
        destination: &dyn Tiling,
        (from, to): (&[u32], &[u32]),
        same: &[i64],
        poll: Poll<'_>,
    ) -> Result<Self> {
        for (left, given, tiling) in [("from", from, source), ("to", to, destination)] {
            let right_len = usize::try_from(tiling.holders()).unwrap_or(usize::MAX);
            if given.len() != right_len {
                return Err(Error::Length { left, left_len: given.len(), right: "holders", right_len });
            }
        }
        let (tiles, pieces) = (source.tiles(poll)?, destination.pieces(poll)?);
        let mut sort = Self { is_plain: true, ..Self::default() };
        let mut slots: HashMap<(i64, usize), u32> = HashMap::new();
        walk(&*tiles, &pieces, same, poll, |found| {
            let (receiver, volume) = (to[found.destination], found.region.volume());
            let list = if found.own.is_some() { &mut sort.kept } else { &mut sort.received };
            match list.last_mut() {
                Some(last) if last.0 == receiver => last.1 = last.1.saturating_add(volume),
                _ => {
                    list.room(1, TRANSFERS)?;
                    list.push((receiver, volume));
                }
            }
            if found.own.is_some() {
                return Ok(());
            }
            slots.room(1, TRANSFERS)?;
            let slot = match slots.get(&(found.tile, found.addend)) {
                Some(&slot) => slot,
                None => {
                    let holders = tiles.replicas(found.tile, found.addend)?;
                    let mut choices = room::list(holders.len(), TRANSFERS)?;
                    choices.extend(holders.iter().map(|&holder| (holder as u32, from[holder as usize])));
                    sort.is_plain &= choices.len() == 1;
                    sort.choices.room(1, TRANSFERS)?;
                    sort.choices.push(choices);
                    let slot = (sort.choices.len() - 1) as u32;
                    slots.insert((found.tile, found.addend), slot);
                    slot
                }
            };
            sort.transfers.room(1, TRANSFERS)?;
            sort.transfers.push((slot, receiver, volume));
            Ok(())
        })?;
        Ok(sort)
    }

    fn volume(&self) -> i64 {
        self.transfers.iter().fold(0, |sum, transfer| sum.saturating_add(transfer.2))
    }
}

/// The senders of many tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// For each tensor, the source holder that sends each of its transfers; none if each box has one holder only.
    pub senders: Vec<Option<Vec<i64>>>,
    /// The bytes that each participant sends,
    pub sent: Vec<i64>,
    /// receives,
    pub received: Vec<i64>,
    /// and has already.
    pub kept: Vec<i64>,
}

impl Model {
    /// Spreads the sending of all tensors, each given by its sort and the bytes of an element. `nodes[p]` is the node of
    /// participant `p`; none if links between nodes do not count.
    ///
    /// # Errors
    /// [`Error::Length`] if a participant has no node; [`Error::OutOfRange`] for a sort that is not there, [`Error::Overflow`] if a participant has more than 2^63 - 1
    /// bytes to send or to receive, [`Error::TooMany`] if there is no memory; what `poll` returns.
    pub fn new(
        sorts: &[Sort],
        tensors: &[(usize, i64)],
        participants: usize,
        nodes: Option<&[u32]>,
        poll: Poll<'_>,
    ) -> Result<Self> {
        if let Some(left_len) = nodes.map(<[u32]>::len).filter(|&len| len != participants) {
            return Err(Error::Length { left: "nodes", left_len, right: "participants", right_len: participants });
        }
        let mut links = nodes.map(|nodes| Links { nodes, sent: HashMap::new() });
        let mut totals = [zeros(participants)?, zeros(participants)?, zeros(participants)?];
        let mut itemsizes = zeros(sorts.len())?;
        for (position, &(sort, itemsize)) in tensors.iter().enumerate() {
            let limit = sorts.len() as i64;
            let outside = Error::OutOfRange { what: "sorts", position: Some(position), value: sort as i64, limit };
            let total: &mut i64 = itemsizes.get_mut(sort).ok_or(outside)?;
            *total = total.checked_add(itemsize).ok_or_else(overflow)?;
        }
        let [sent, received, kept] = &mut totals;
        for (sort, &itemsize) in sorts.iter().zip(&itemsizes) {
            poll()?;
            for (total, list) in [(&mut *received, &sort.received), (kept, &sort.kept)] {
                list.iter().try_for_each(|&(who, volume)| add(total, who, volume, itemsize))?;
            }
            if sort.is_plain {
                for &(slot, receiver, volume) in &sort.transfers {
                    let who = sort.choices[slot as usize][0].1;
                    add(sent, who, volume, itemsize)?;
                    links.as_mut().map_or(Ok(()), |links| links.add(who, receiver, volume, itemsize))?;
                }
            }
        }
        let mut order: Vec<(Reverse<i64>, usize)> = room::list(tensors.len(), TRANSFERS)?;
        order.extend((0..tensors.len()).filter(|&i| !sorts[tensors[i].0].is_plain).map(|i| (Reverse(0), i)));
        let mut volumes = zeros(sorts.len())?;
        volumes.iter_mut().zip(sorts).for_each(|(volume, sort)| *volume = sort.volume());
        for (size, i) in &mut order {
            *size = Reverse(volumes[tensors[*i].0].saturating_mul(tensors[*i].1));
        }
        order.sort_unstable();
        let mut heaps = Heaps::new(sorts);
        let mut senders: Vec<Option<Vec<i64>>> = room::filled(None, tensors.len(), TRANSFERS)?;
        let mut ticker = Ticker::new();
        for (_, tensor) in order {
            let (sort, itemsize) = tensors[tensor];
            let mut own: Vec<i64> = room::list(sorts[sort].transfers.len(), TRANSFERS)?;
            for &(slot, receiver, volume) in &sorts[sort].transfers {
                ticker.tick(poll)?;
                let choices = &sorts[sort].choices[slot as usize];
                let (holder, who) = match &mut links {
                    Some(links) if choices.len() <= FEW => links.least(choices, receiver, volume, itemsize, sent),
                    _ => heaps.least(sort, slot as usize, sent)?,
                };
                add(sent, who, volume, itemsize)?;
                links.as_mut().map_or(Ok(()), |links| links.add(who, receiver, volume, itemsize))?;
                own.push(i64::from(holder));
            }
            senders[tensor] = Some(own);
        }
        let [sent, received, kept] = totals;
        Ok(Self { senders, sent, received, kept })
    }
}

fn zeros(len: usize) -> Result<Vec<i64>> {
    room::filled(0, len, TRANSFERS)
}

#[inline]
fn add(totals: &mut [i64], who: u32, volume: i64, itemsize: i64) -> Result<()> {
    let total = &mut totals[who as usize];
    let sum = volume.checked_mul(itemsize).and_then(|bytes| total.checked_add(bytes));
    *total = sum.ok_or_else(overflow)?;
    Ok(())
}

fn overflow() -> Error {
    Error::Overflow { what: "the bytes of one participant of a model's plan".to_owned() }
}

/// The bytes that go from node to node.
struct Links<'a> {
    /// The node of each participant.
    nodes: &'a [u32],
    /// The bytes from one to another.
    sent: HashMap<(u32, u32), i64>,
}

impl Links<'_> {
    /// The replica that sends: among those that have sent hardly more than the least, by at most
    /// what is to be sent now, the one whose node has sent the fewest bytes to the receiver's; the
    /// one that has sent least, and the first, of equals.
    fn least(&self, choices: &[(u32, u32)], receiver: u32, volume: i64, itemsize: i64, sent: &[i64]) -> (u32, u32) {
        let load = |who: u32| sent[who as usize];
        let least = choices.iter().map(|&(_, who)| load(who)).min().unwrap_or(0);
        let most = least.saturating_add(volume.saturating_mul(itemsize));
        let to = self.nodes[receiver as usize];
        let link = |who: u32| {
            let from = self.nodes[who as usize];
            if from == to { -1 } else { self.sent.get(&(from, to)).copied().unwrap_or(0) }
        };
        let near = choices.iter().filter(|&&(_, who)| load(who) <= most);
        near.min_by_key(|&&(_, who)| (link(who), load(who))).copied().unwrap_or(choices[0])
    }

    fn add(&mut self, who: u32, receiver: u32, volume: i64, itemsize: i64) -> Result<()> {
        let key = (self.nodes[who as usize], self.nodes[receiver as usize]);
        if key.0 != key.1 {
            self.sent.room(1, TRANSFERS)?;
            // No more than a participant has to send, which is checked.
            let total = self.sent.entry(key).or_default();
            *total = total.saturating_add(volume.saturating_mul(itemsize));
        }
        Ok(())
    }
}

/// Holders by what they have to send, the least loaded first.
type Loads = BinaryHeap<Reverse<(i64, usize)>>;

/// For boxes of many replicas, what each had sent when it was looked at last: as much as now, or less.
struct Heaps<'a> {
    sorts: &'a [Sort],
    heaps: HashMap<(usize, usize), Loads>,
}

impl<'a> Heaps<'a> {
    fn new(sorts: &'a [Sort]) -> Self {
        Self { sorts, heaps: HashMap::new() }
    }

    /// The replica that has sent least, the first of equals.
    fn least(&mut self, sort: usize, slot: usize, sent: &[i64]) -> Result<(u32, u32)> {
        let choices = &self.sorts[sort].choices[slot];
        let load = |position: usize| sent[choices[position].1 as usize];
        if choices.len() <= FEW {
            let least = (0..choices.len()).min_by_key(|&position| load(position)).unwrap_or(0);
            return Ok(choices[least]);
        }
        let heap = match self.heaps.entry((sort, slot)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let mut all = room::list(choices.len(), TRANSFERS)?;
                all.extend((0..choices.len()).map(|position| Reverse((load(position), position))));
                entry.insert(BinaryHeap::from(all))
            }
        };
        loop {
            let Some(mut top) = heap.peek_mut() else { return Ok(choices[0]) };
            let Reverse((known, position)) = *top;
            if load(position) == known {
                return Ok(choices[position]);
            }
            *top = Reverse((load(position), position));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        parallel::never,
        plan::Plan,
        tiling::tests::{seeds, shapes, tiling_of},
    };
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_totals_are_those_of_the_plans_and_no_sender_could_be_relieved(
            shape in shapes(),
            kinds in prop::collection::vec((0..6_usize, 0..6_usize), 1..4),
            from in seeds(),
            to in seeds(),
            tensors in prop::collection::vec((0..3_usize, 1..5_i64), 0..9),
            shift in 0..9_i64,
            of_a_node in 0..5_u32,
        ) {
            let nodes: Option<Vec<u32>> = (of_a_node > 0).then(|| (0..200).map(|p| p / of_a_node).collect());
            let pairs: Vec<_> = kinds.iter().map(|k| (tiling_of(&shape, k.0, &from), tiling_of(&shape, k.1, &to))).collect();
            // Participant h is holder h of every source; that of a destination is the one `shift` further on.
            let same: Vec<Vec<i64>> = pairs.iter().map(|(source, destination)| {
                (0..destination.holders()).map(|d| if d + shift < source.holders() { d + shift } else { -1 }).collect()
            }).collect();
            let ids = |count: i64, shift: i64| -> Vec<u32> { (0..count).map(|h| (h + shift) as u32).collect() };
            let sorts: Vec<Sort> = pairs.iter().zip(&same).map(|((source, destination), same)| {
                let (from, to) = (ids(source.holders(), 0), ids(destination.holders(), shift));
                Sort::new(&**source, &**destination, (&from, &to), same, &mut never).unwrap()
            }).collect();
            let tensors: Vec<_> = tensors.iter().map(|&(sort, itemsize)| (sort % sorts.len(), itemsize)).collect();
            let model = Model::new(&sorts, &tensors, 200, nodes.as_deref(), &mut never).unwrap();
            let mut totals = [vec![0; 200], vec![0; 200], vec![0; 200]];
            for (i, &(sort, itemsize)) in tensors.iter().enumerate() {
                let ((source, destination), same) = (&pairs[sort], &same[sort]);
                let all = 0..destination.holders() as usize;
                let plan = match &model.senders[i] {
                    Some(senders) => Plan::with_senders(source.clone(), destination.clone(), same.clone(), senders, &mut never),
                    None => Plan::new(source.clone(), destination.clone(), same.clone(), &mut never),
                }.unwrap();
                plan.visit_transfers(all.clone(), &mut never, |t| {
                    totals[0][t.source as usize] += t.region.volume() * itemsize;
                    totals[1][(t.destination + shift) as usize] += t.region.volume() * itemsize;
                    Ok(())
                }).unwrap();
                plan.visit_kept(all, |t| {
                    totals[2][(t.destination + shift) as usize] += t.region.volume() * itemsize;
                    Ok(())
                }).unwrap();
            }
            prop_assert_eq!([&model.sent, &model.received, &model.kept], [&totals[0], &totals[1], &totals[2]]);
            // Greedy: of two holders of one box the busier one is busier by no more than what it sent last; with nodes,
            // it may have been busier by as much before.
            let times = if nodes.is_some() { 2 } else { 1 };
            let largest = tensors.iter().map(|&(sort, itemsize)| {
                itemsize * sorts[sort].transfers.iter().map(|t| t.2).max().unwrap_or(0)
            }).max().unwrap_or(0);
            for &(sort, _) in &tensors {
                for choices in sorts[sort].choices.iter().filter(|choices| choices.len() == sorts[sort].choices[0].len()) {
                    let lone = |who: u32| sorts.iter().all(|s| s.choices.iter().all(|c| c == choices || c.iter().all(|h| h.1 != who)));
                    if choices.iter().all(|&(_, who)| lone(who)) {
                        let loads = choices.iter().map(|&(_, who)| model.sent[who as usize]);
                        prop_assert!(loads.clone().max().unwrap() - loads.min().unwrap() <= times * largest);
                    }
                }
            }
        }
    }

    #[test]
    fn a_replica_is_chosen_up_to_what_is_sent_now() {
        // Two replicas on the nodes 0 and 1, a receiver on node 2; the link of the first is the busier one.
        let links = || Links { nodes: &[0, 1, 2], sent: HashMap::from([((0, 2), 7), ((1, 2), 3)]) };
        let choices = [(10, 0), (11, 1)];
        let chosen = |busy: i64| links().least(&choices, 2, 5, 4, &[100, busy, 0]);
        // By 20 bytes, which are to be sent, the other may be busier, and by no more.
        assert_eq!([chosen(100), chosen(119), chosen(120), chosen(121)], [(11, 1), (11, 1), (11, 1), (10, 0)]);
        // If it is as busy as the least, that one is the other.
        assert_eq!(links().least(&[(11, 1), (10, 0)], 2, 5, 4, &[121, 100, 0]), (11, 1));
        assert_eq!(links().least(&[(11, 1), (10, 0)], 2, 5, 4, &[0, 20, 0]), (11, 1));
        assert_eq!(links().least(&[(11, 1), (10, 0)], 2, 5, 4, &[0, 21, 0]), (10, 0));
    }

    #[test]
    fn replicated_tensors_are_sent_by_all_replicas_alike() {
        // As many norms as 80, each of which 40 replicas hold and 3 others want: 6 of 240 for each.
        let ranges: Vec<(i64, i64)> = vec![(0, 16); 40];
        let replicas = crate::tiling::flat::FlatRanges::new(&[16], ranges.iter().copied(), true).unwrap();
        let others = crate::tiling::flat::FlatRanges::new(&[16], ranges.iter().copied().take(3), true).unwrap();
        let (from, to): (Vec<u32>, Vec<u32>) = ((0..40).collect(), (40..43).collect());
        let sort = Sort::new(&replicas, &others, (&from, &to), &[-1; 3], &mut never).unwrap();
        let model = Model::new(&[sort], &[(0, 2); 80], 43, None, &mut never).unwrap();
        assert_eq!(model.sent[..40], [6 * 16 * 2; 40]);
        assert_eq!(model.received[40..], [80 * 16 * 2; 3]);
        assert_eq!(
            Model::new(&[], &[(0, 1)], 1, None, &mut never).unwrap_err().to_string(),
            "sorts[0] is 0, but the valid range is empty"
        );
    }
}
