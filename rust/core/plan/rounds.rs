//! The transfers in rounds, so that no device has more than a budget of bytes under way.
//!
//! Within a round no device sends, and none receives, more than the budget; a box that is larger is cut along its major
//! dims. Each piece goes into the first round that has room at both ends. The pieces are taken in the order of the
//! classical all-to-all, where destination `d` begins with its `d`-th piece: then a full exchange among `n` devices, a
//! piece of the budget's size each, takes the `n` rounds that it must, where the plain order would take up to `2n - 1`.

use std::collections::HashMap;

use crate::{
    error::{Error, Result},
    index::radix,
    plan::transfer::Transfer,
    room::{self, Room as _},
    tiling::{Poll, tiles::Ticker},
};

/// The list that there may be no room for here.
const PARTS: &str = "the pieces that max_bytes_in_flight makes";

/// Transfers in rounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rounds {
    /// The pieces, in rows like the plan's, in the order of the rounds.
    pub rows: Vec<i64>,
    /// The number of pieces up to the end of each round.
    pub ends: Vec<usize>,
}

/// Puts the transfers of `rows`, in a plan's order and of `rank` dims, into rounds of at most `budget` bytes per device
/// and direction, for elements of `itemsize` bytes.
///
/// # Errors
/// [`Error::Budget`] if not even one element fits; [`Error::TooMany`] if the pieces are too many to list; what `poll`
/// returns.
///
/// ```
/// use shardwise_core::plan::rounds::rounds;
/// // Devices 0 and 1 send two elements each to device 2: one after the other, if it takes in only two at a time.
/// let both = [0, 2, 0, 2, 1, 2, 2, 4];
/// assert_eq!(rounds(&both, 1, 2, 1, &mut || Ok(()))?.ends, [1, 2]);
/// assert_eq!(rounds(&both, 1, 4, 1, &mut || Ok(()))?.ends, [2]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn rounds(rows: &[i64], rank: usize, budget: i64, itemsize: i64, poll: Poll<'_>) -> Result<Rounds> {
    let width = Transfer::row_length(rank);
    let limit = budget / itemsize.max(1);
    if limit < 1 {
        return Err(Error::Budget { given: budget, itemsize });
    }
    let mut ticker = Ticker::new();
    let parts = cut(rows, rank, limit, &mut || ticker.tick(poll))?;
    let part = |i: usize| Transfer::of_row(&parts[i * width..(i + 1) * width]);
    let count = parts.len() / width;
    let (mut senders, mut receivers) = (Loads::new(limit), Loads::new(limit));
    let mut groups: Vec<Group> = Vec::new();
    for i in 0..count {
        let transfer = part(i);
        let elements = transfer.region.volume();
        senders.expect(transfer.source, elements)?;
        receivers.expect(transfer.destination, elements)?;
        match groups.last_mut() {
            Some(group) if part(group.start).destination == transfer.destination => group.len += 1,
            _ => {
                groups.room(1, PARTS)?;
                groups.push(Group { start: i, len: 1, number: groups.len() });
            }
        }
    }
    let mut placed: Vec<(usize, usize)> = room::list(count, PARTS)?;
    for turn in 0.. {
        groups.retain(|group| turn < group.len);
        if groups.is_empty() {
            break;
        }
        for group in &groups {
            ticker.tick(poll)?;
            let i = group.start + (turn + group.number) % group.len;
            let transfer = part(i);
            let elements = transfer.region.volume();
            let mut round = 0;
            loop {
                let open = senders.next_open(transfer.source, round, elements, &mut || ticker.tick(poll))?;
                round = receivers.next_open(transfer.destination, open, elements, &mut || ticker.tick(poll))?;
                if round == open {
                    break;
                }
            }
            senders.add(transfer.source, round, elements)?;
            receivers.add(transfer.destination, round, elements)?;
            placed.push((round, i));
        }
    }
    poll()?;
    placed.sort_unstable();
    listed(&placed, &parts, width, &mut || ticker.tick(poll))
}

/// The parts in the order in which they were placed: by round.
fn listed(placed: &[(usize, usize)], parts: &[i64], width: usize, poll: Poll<'_>) -> Result<Rounds> {
    let count = placed.last().map_or(0, |&(round, _)| round + 1);
    let mut ends: Vec<usize> = room::filled(0, count, PARTS)?;
    for &(round, _) in placed {
        ends[round] += 1;
    }
    for round in 1..count {
        ends[round] += ends[round - 1];
    }
    let mut rows: Vec<i64> = room::list(parts.len(), PARTS)?;
    for &(_, i) in placed {
        poll()?;
        rows.extend_from_slice(&parts[i * width..(i + 1) * width]);
    }
    Ok(Rounds { rows, ends })
}

/// The parts that go to one destination.
struct Group {
    start: usize,
    len: usize,
    number: usize,
}

/// The elements that each holder has under way in each round, in one direction. Only rounds with
/// something under way take memory.
struct Loads {
    limit: i64,
    /// For a holder and a round, the elements.
    loads: HashMap<(i64, usize), i64>,
    /// For a holder and a round that has no room for the least of the holder's parts: a later round, to go on from.
    full: HashMap<(i64, usize), usize>,
    /// The elements of each holder's least part.
    least: HashMap<i64, i64>,
}

impl Loads {
    fn new(limit: i64) -> Self {
        Self { limit, loads: HashMap::new(), full: HashMap::new(), least: HashMap::new() }
    }

    /// A part of `elements` of `holder` is to come.
    fn expect(&mut self, holder: i64, elements: i64) -> Result<()> {
        self.least.room(1, PARTS)?;
        self.least.entry(holder).and_modify(|least| *least = elements.min(*least)).or_insert(elements);
        Ok(())
    }

    /// The first round from `round` on that has room for `elements`, which are no more than the limit.
    fn next_open(&mut self, holder: i64, round: usize, elements: i64, poll: Poll<'_>) -> Result<usize> {
        let mut at = self.not_full(holder, round);
        while self.loads.get(&(holder, at)).is_some_and(|&load| load > self.limit - elements) {
            poll()?;
            at = self.not_full(holder, at + 1);
        }
        Ok(at)
    }

    /// The first round from `round` on with room for the least part. The way there is made shorter for the next time.
    fn not_full(&mut self, holder: i64, round: usize) -> usize {
        let mut end = round;
        while let Some(&next) = self.full.get(&(holder, end)) {
            end = next;
        }
        let mut at = round;
        while at != end {
            let Some(next) = self.full.insert((holder, at), end) else { break };
            at = next;
        }
        end
    }

    fn add(&mut self, holder: i64, round: usize, elements: i64) -> Result<()> {
        self.loads.room(1, PARTS)?;
        self.full.room(1, PARTS)?;
        let load = self.loads.entry((holder, round)).or_default();
        *load += elements;
        if *load > self.limit - self.least.get(&holder).copied().unwrap_or(1) {
            self.full.insert((holder, round), round + 1);
        }
        Ok(())
    }
}

/// The rows, with every box of more than `limit` elements cut into slabs: one step along the dims before some dim, as
/// many as fit along that, and all of those after it.
fn cut(rows: &[i64], rank: usize, limit: i64, poll: Poll<'_>) -> Result<Vec<i64>> {
    let width = Transfer::row_length(rank);
    let mut parts = Vec::new();
    let (mut start, mut stop) = (vec![0; rank], vec![0; rank]);
    for row in rows.chunks_exact(width) {
        poll()?;
        let transfer = Transfer::of_row(row);
        let region = transfer.region;
        let extents: Vec<i64> = region.extents().collect();
        // The last dim whose whole extent no longer fits is the one to step along.
        let (mut inner, mut dim) = (1_i64, rank);
        while dim > 0 && inner <= limit / extents[dim - 1].max(1) {
            dim -= 1;
            inner *= extents[dim];
        }
        parts.room(width, PARTS)?;
        let Some(along) = dim.checked_sub(1) else {
            parts.extend_from_slice(row);
            continue;
        };
        let step = limit / inner;
        let slabs = radix::ceil_div(extents[along], step);
        let count = extents[..along].iter().try_fold(slabs, |count, n| count.checked_mul(*n));
        let numbers = count.and_then(|n| usize::try_from(n).ok()).and_then(|n| n.checked_mul(width));
        let numbers = numbers.ok_or_else(|| room::none(format_args!("the pieces of {}", region.text())))?;
        parts.room(numbers, PARTS)?;
        start.copy_from_slice(region.start());
        stop.copy_from_slice(region.stop());
        // An odometer over the dims up to the one that is stepped along.
        let bounds =
            |d: usize, at: i64| (at, at.saturating_add(if d == along { step } else { 1 }).min(region.stop()[d]));
        (0..=along).for_each(|d| (start[d], stop[d]) = bounds(d, start[d]));
        loop {
            poll()?;
            parts.extend_from_slice(&row[..2]);
            parts.extend_from_slice(&start);
            parts.extend_from_slice(&stop);
            let Some(d) = (0..=along).rev().find(|&d| stop[d] < region.stop()[d]) else { break };
            (start[d], stop[d]) = bounds(d, stop[d]);
            (d + 1..=along).for_each(|d| (start[d], stop[d]) = bounds(d, region.start()[d]));
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    #[test]
    fn a_poll_stops_the_work() {
        // One transfer to each of many, and one that is cut into many.
        let many: Vec<i64> = (0..1 << 16).flat_map(|d| [0, d, 0, 1]).collect();
        for (rows, budget) in [(&many[..], i64::MAX), (&[0, 1, 0, 1 << 16][..], 1)] {
            let mut polls = 0;
            assert!(
                rounds(rows, 1, budget, 1, &mut || {
                    polls += 1;
                    Ok(())
                })
                .is_ok()
            );
            assert!(polls > 4, "{polls}");
            for stop in 0..polls {
                let mut left = stop;
                let mut poll = || {
                    if left == 0 {
                        Err(Error::Interrupted)
                    } else {
                        left -= 1;
                        Ok(())
                    }
                };
                assert_eq!(rounds(rows, 1, budget, 1, &mut poll), Err(Error::Interrupted));
            }
        }
    }

    #[test]
    fn memory_and_time_do_not_grow_with_the_square() {
        // A gather of as many as would take a table of 10^10 loads, and one transfer in as many parts; each part fills
        // its round except for one element, so that no round is full to the brim.
        let n = 100_000;
        let gather: Vec<i64> = (0..n).flat_map(|s| [s, 0, 3 * s, 3 * s + 3]).collect();
        assert_eq!(rounds(&gather, 1, 4, 1, &mut || Ok(())).unwrap().ends.len() as i64, n);
        let one = [0, 1, 0, 0, n, 3];
        assert_eq!(rounds(&one, 2, 4, 1, &mut || Ok(())).unwrap().ends.len() as i64, n);
        // One long list of parts beside many short ones.
        let mut mixed: Vec<i64> = (0..n).flat_map(|s| [s, 0, s, s + 1]).collect();
        mixed.extend((1..n).flat_map(|d| [0, d, 0, 1]));
        assert!(rounds(&mixed, 1, 1, 1, &mut || Ok(())).is_ok());
    }

    #[test]
    fn a_full_exchange_takes_as_many_rounds_as_devices() {
        // Of eight devices the plain order would do as well.
        for n in 5..9 {
            let rows: Vec<i64> = (0..n).flat_map(|d| (0..n).flat_map(move |s| [s, d, s, s + 1])).collect();
            assert_eq!(rounds(&rows, 1, 1, 1, &mut || Ok(())).unwrap().ends.len(), n as usize);
        }
    }

    #[test]
    fn what_a_holder_sends_in_all_may_be_more_than_a_number_holds() {
        // The same 2^62 elements go to three holders: one at a time is all that the largest budget allows.
        let rows: Vec<i64> = (1..4).flat_map(|d| [0, d, 0, 1 << 62]).collect();
        assert_eq!(rounds(&rows, 1, i64::MAX, 1, &mut || Ok(())).unwrap().ends, [1, 2, 3]);
        assert_eq!(rounds(&rows, 1, 1 << 62, 1, &mut || Ok(())).unwrap().ends, [1, 2, 3]);
    }

    #[test]
    fn a_round_is_filled_up_before_the_next() {
        // Three elements and one from device 0, of which it sends four at a time; then two.
        let rows = [0, 1, 0, 3, 0, 2, 3, 4, 0, 3, 4, 6];
        assert_eq!(rounds(&rows, 1, 4, 1, &mut || Ok(())).unwrap().ends, [2, 3]);
    }

    #[test]
    fn a_budget_below_one_element_is_refused() {
        let none = rounds(&[0, 0, 0, 1], 1, 3, 4, &mut || Ok(()));
        assert_eq!(none, Err(Error::Budget { given: 3, itemsize: 4 }));
    }

    #[test]
    fn a_box_is_cut_along_its_major_dims_into_as_few_slabs_as_fit() {
        let all = |row: &[i64], rank, limit| cut(row, rank, limit, &mut || Ok(())).unwrap();
        // Four rows of three.
        let row = [7, 8, 10, 20, 14, 23];
        let rows = |starts: &[i64], step: i64| -> Vec<i64> {
            starts.iter().flat_map(|&y| [7, 8, y, 20, (y + step).min(14), 23]).collect()
        };
        assert_eq!(all(&row, 2, 12), row);
        assert_eq!(all(&row, 2, 11), rows(&[10, 13], 3));
        assert_eq!(all(&row, 2, 6), rows(&[10, 12], 2));
        assert_eq!(all(&row, 2, 5), rows(&[10, 11, 12, 13], 1));
        let halves: Vec<_> = (10..14).flat_map(|y| [7, 8, y, 20, y + 1, 22, 7, 8, y, 22, y + 1, 23]).collect();
        assert_eq!(all(&row, 2, 2), halves);
        // Two planes of two rows of five: by planes, by rows, and by parts of rows.
        let row = [0, 1, 1, 2, 3, 3, 4, 8];
        let planes: Vec<_> = (1..3).flat_map(|z| [0, 1, z, 2, 3, z + 1, 4, 8]).collect();
        assert_eq!(all(&row, 3, 19), planes);
        assert_eq!(all(&row, 3, 10), planes);
        let corners = || (1..3).flat_map(|z| (2..4).map(move |y| (z, y)));
        let rows: Vec<_> = corners().flat_map(|(z, y)| [0, 1, z, y, 3, z + 1, y + 1, 8]).collect();
        assert_eq!(all(&row, 3, 9), rows);
        let parts =
            corners().flat_map(|(z, y)| [(3, 6), (6, 8)].map(|(start, stop)| [0, 1, z, y, start, z + 1, y + 1, stop]));
        assert_eq!(all(&row, 3, 3), parts.flatten().collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn rounds_keep_the_budget_and_lose_nothing(
            boxes in prop::collection::vec((0..4_i64, 0..4_i64, 1..5_i64, 1..5_i64), 0..12),
            budget in 1..20_i64,
            left in 0..9_i64,
        ) {
            let mut boxes = boxes;
            boxes.sort_by_key(|b| b.1);
            let rows: Vec<i64> = boxes.iter().enumerate()
                .flat_map(|(i, &(s, d, h, w))| [s, d, 10 * i as i64, left, 10 * i as i64 + h, left + w]).collect();
            let done = rounds(&rows, 2, budget, 1, &mut || Ok(())).unwrap();
            let mut seen = HashSet::new();
            let mut begin = 0;
            for &end in &done.ends {
                let mut loads: HashMap<(usize, i64), i64> = HashMap::new();
                for row in done.rows[begin * 6..end * 6].chunks(6) {
                    for y in row[2]..row[4] {
                        for x in row[3]..row[5] {
                            let of = boxes[y as usize / 10];
                            prop_assert_eq!((of.0, of.1), (row[0], row[1]));
                            prop_assert!(y % 10 < of.2 && (left..left + of.3).contains(&x) && seen.insert((y, x)));
                            *loads.entry((0, row[0])).or_default() += 1;
                            *loads.entry((1, row[1])).or_default() += 1;
                        }
                    }
                }
                prop_assert!(end > begin && loads.values().all(|&load| load <= budget));
                begin = end;
            }
            prop_assert_eq!(seen.len() as i64, boxes.iter().map(|b| b.2 * b.3).sum::<i64>());
        }
    }
}
