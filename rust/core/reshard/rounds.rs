//! The transfers in rounds, so that no device has more than a budget of bytes under way.
//!
//! Within a round no device sends, and none receives, more than the budget; a box that is larger is cut along its major
//! dims. Each piece goes into the first round that has room at both ends. The pieces are taken in the order of the
//! classical all-to-all, where destination `d` begins with its `d`-th piece: then a full exchange among `n` devices, a
//! piece of the budget's size each, takes the `n` rounds that it must, where the plain order would take up to `2n - 1`.

use crate::error::{Error, Result};

/// How many destinations are given a turn between two polls.
const GROUPS_PER_POLL: usize = 1 << 12;

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
/// use shardwise_core::reshard::rounds::rounds;
/// // Devices 0 and 1 send two elements each to device 2: one after the other, if it takes in only two at a time.
/// let both = [0, 2, 0, 2, 1, 2, 2, 4];
/// assert_eq!(rounds(&both, 1, 2, 1, &mut || Ok(()))?.ends, [1, 2]);
/// assert_eq!(rounds(&both, 1, 4, 1, &mut || Ok(()))?.ends, [2]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
pub fn rounds(
    rows: &[i64],
    rank: usize,
    budget: i64,
    itemsize: i64,
    poll: &mut dyn FnMut() -> Result<()>,
) -> Result<Rounds> {
    let width = 2 + 2 * rank;
    let limit = budget / itemsize.max(1);
    if limit < 1 {
        return Err(Error::Budget { given: budget, itemsize });
    }
    let pieces = cut(rows, rank, limit)?;
    let piece = |i: usize| &pieces[i * width..(i + 1) * width];
    let mut groups: Vec<(usize, usize)> = Vec::new();
    for i in 0..pieces.len() / width {
        match groups.last_mut() {
            Some((start, len)) if piece(*start)[1] == piece(i)[1] => *len += 1,
            _ => groups.push((i, 1)),
        }
    }
    let mut senders = Loads::new(rows, 0, width, limit);
    let mut receivers = Loads::new(rows, 1, width, limit);
    let mut placed: Vec<(usize, usize)> = Vec::with_capacity(pieces.len() / width);
    let longest = groups.iter().map(|&(_, len)| len).max().unwrap_or(0);
    for turn in 0..longest {
        for (number, &(start, len)) in groups.iter().enumerate() {
            if number % GROUPS_PER_POLL == 0 {
                poll()?;
            }
            if turn >= len {
                continue;
            }
            let i = start + (turn + number) % len;
            let row = piece(i);
            let elements = volume(row, rank);
            let mut round = senders.first_open(row[0]).max(receivers.first_open(row[1]));
            while !(senders.has_room(row[0], round, elements) && receivers.has_room(row[1], round, elements)) {
                round += 1;
            }
            senders.add(row[0], round, elements);
            receivers.add(row[1], round, elements);
            placed.push((round, i));
        }
    }
    placed.sort_unstable();
    let count = placed.last().map_or(0, |&(round, _)| round + 1);
    let mut ends = vec![0; count];
    for &(round, _) in &placed {
        ends[round] += 1;
    }
    for round in 1..count {
        ends[round] += ends[round - 1];
    }
    Ok(Rounds { rows: placed.iter().flat_map(|&(_, i)| piece(i)).copied().collect(), ends })
}

/// What each device has under way in each round, in one direction.
struct Loads {
    limit: i64,
    rounds: Vec<Vec<i64>>,
    /// For each device, the first round that is not full.
    open: Vec<usize>,
}

impl Loads {
    fn new(rows: &[i64], column: usize, width: usize, limit: i64) -> Self {
        let devices = rows.chunks_exact(width).map(|row| row[column] as usize + 1).max().unwrap_or(0);
        Self { limit, rounds: vec![Vec::new(); devices], open: vec![0; devices] }
    }

    fn first_open(&self, device: i64) -> usize {
        self.open[device as usize]
    }

    fn has_room(&self, device: i64, round: usize, elements: i64) -> bool {
        self.rounds[device as usize].get(round).is_none_or(|load| load + elements <= self.limit)
    }

    fn add(&mut self, device: i64, round: usize, elements: i64) {
        let (loads, open) = (&mut self.rounds[device as usize], &mut self.open[device as usize]);
        if loads.len() <= round {
            loads.resize(round + 1, 0);
        }
        loads[round] += elements;
        while loads.get(*open).is_some_and(|&load| load == self.limit) {
            *open += 1;
        }
    }
}

fn volume(row: &[i64], rank: usize) -> i64 {
    (0..rank).map(|dim| row[2 + rank + dim] - row[2 + dim]).product()
}

/// The rows, with every box of more than `limit` elements cut into slabs: one step along the dims before some dim, as
/// many as fit along that, and all of those after it.
fn cut(rows: &[i64], rank: usize, limit: i64) -> Result<Vec<i64>> {
    let too_many = || Error::TooMany { what: "the pieces that max_bytes_in_flight makes".to_owned() };
    let width = 2 + 2 * rank;
    let mut pieces = Vec::new();
    for row in rows.chunks_exact(width) {
        let mut inner = 1_i64;
        let mut dim = rank;
        // The last dim whose whole extent no longer fits is the one to step along.
        while dim > 0 && inner <= limit / (row[1 + rank + dim] - row[1 + dim]).max(1) {
            dim -= 1;
            inner *= row[2 + rank + dim] - row[2 + dim];
        }
        let Some(along) = dim.checked_sub(1) else {
            pieces.extend_from_slice(row);
            continue;
        };
        let step = limit / inner;
        let mut extents: Vec<i64> = (0..along).map(|d| row[2 + rank + d] - row[2 + d]).collect();
        extents.push(crate::radix::ceil_div(row[2 + rank + along] - row[2 + along], step));
        let count = crate::radix::product("pieces", &extents)?;
        let numbers = usize::try_from(count).ok().and_then(|n| n.checked_mul(width)).ok_or_else(too_many)?;
        pieces.try_reserve(numbers).map_err(|_| too_many())?;
        for number in 0..count {
            let begin = pieces.len();
            pieces.extend_from_slice(row);
            let piece = &mut pieces[begin..];
            for (d, digit) in crate::radix::unravel(number, &extents).into_iter().enumerate() {
                let (size, end) = if d == along { (step, row[2 + rank + d]) } else { (1, i64::MAX) };
                piece[2 + d] = row[2 + d] + digit * size;
                piece[2 + rank + d] = piece[2 + d].saturating_add(size).min(end);
            }
        }
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    #[test]
    fn many_destinations_are_polled_for_within_a_turn() {
        // One box each, so that there is one turn of three times as many as between two polls.
        let rows: Vec<i64> = (0..3 * GROUPS_PER_POLL as i64).flat_map(|d| [0, d, 0, 1]).collect();
        let mut polls = 0;
        // The second poll of the second call asks to stop.
        let mut poll = || {
            polls += 1;
            if polls < 5 { Ok(()) } else { Err(Error::Interrupted) }
        };
        assert!(rounds(&rows, 1, i64::MAX, 1, &mut poll).is_ok());
        assert_eq!(rounds(&rows, 1, i64::MAX, 1, &mut poll), Err(Error::Interrupted));
        assert_eq!(polls, 5);
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
        let all = |row: &[i64], rank, limit| cut(row, rank, limit).unwrap();
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
