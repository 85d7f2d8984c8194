//! All parts of one dim.

use crate::{
    error::{Error, Result},
    room,
    sections::part::{Interval, Part},
    uneven::Dim,
};

/// The most numbers that are kept of where the parts begin in the arrays of all shards.
const TABLE_LIMIT: i64 = 1 << 16;

/// One dim of a packed partition; a plain dim is one of one part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sections {
    n: i64,
    shards: i64,
    parts: Vec<Part>,
    /// No array is longer.
    longest: i64,
    /// The start of each part in the arrays, with their ends: (shards, parts + 1), one row if all
    /// shards are alike; empty if there are too many.
    begins: Vec<i64>,
    uniform: bool,
}

impl Sections {
    /// The dim `dim` of `n` elements, cut into `shards`.
    ///
    /// # Errors
    /// [`Error::Overflow`] if a holder's array along the dim is over 2^63 - 1 elements, with its padding.
    pub(crate) fn new(dim: usize, n: i64, shards: i64, parts: Vec<Part>) -> Result<Self> {
        let longest = (parts.iter())
            .try_fold(0_i64, |sum, part| sum.checked_add(part.largest_room()))
            .ok_or_else(|| Error::Overflow { what: format!("dim {dim}: the padded sum of its parts") })?;
        let uniform = parts.iter().all(Part::is_uniform);
        let rows = if uniform { 1 } else { shards };
        let mut begins = Vec::new();
        if rows.saturating_mul(parts.len() as i64 + 1) <= TABLE_LIMIT.max(parts.len() as i64 + 1) {
            for index in 0..rows {
                let mut at = 0;
                begins.push(0);
                for part in &parts {
                    at += part.room(index);
                    begins.push(at);
                }
            }
        }
        Ok(Self { n, shards, parts, longest, begins, uniform })
    }

    /// The parts.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// True if the arrays of all shards are alike.
    #[must_use]
    pub fn is_uniform(&self) -> bool {
        self.uniform
    }

    /// The start of each part in the array of shard `index`, and the end of the array; none if it
    /// is not kept.
    #[inline]
    fn kept(&self, index: i64) -> Option<&[i64]> {
        let row = self.parts.len() + 1;
        let at = if self.uniform { 0 } else { index as usize * row };
        self.begins.get(at..at + row)
    }

    /// The start of part `part` in the array of shard `index`.
    #[inline]
    #[must_use]
    pub fn begin(&self, part: usize, index: i64) -> i64 {
        match self.kept(index) {
            Some(begins) => begins[part],
            None => self.parts[..part].iter().map(|part| part.room(index)).sum(),
        }
    }

    /// The elements of shard `index`, without padding.
    #[must_use]
    pub fn held(&self, index: i64) -> i64 {
        self.parts.iter().map(|part| part.held(index)).sum()
    }

    /// A length that no array exceeds: the sum of the largest shards of the parts.
    #[must_use]
    pub fn longest(&self) -> i64 {
        self.longest
    }

    /// The number of intervals of shard `index`.
    #[must_use]
    pub fn count(&self, index: i64) -> i64 {
        self.parts.iter().fold(0_i64, |sum, part| sum.saturating_add(part.intervals(index)))
    }

    /// The intervals of shard `index`, in the order of its array, which is theirs in the dim.
    ///
    /// # Errors
    /// [`Error::TooMany`] if there is no memory for them.
    pub fn intervals(&self, index: i64) -> Result<Vec<Interval>> {
        let count = self.count(index);
        let mut all = room::list(count, format_args!("{count} pieces of one device along one dim"))?;
        self.visit(index, &mut |interval| all.push(interval));
        Ok(all)
    }

    /// Shows `visit` the intervals of shard `index`, in order.
    pub(crate) fn visit(&self, index: i64, visit: &mut dyn FnMut(Interval)) {
        let mut local = 0;
        for part in &self.parts {
            part.visit(index, local, visit);
            local += part.room(index);
        }
    }

    /// The part that holds `position`, which must be in `0..elements()`.
    #[inline]
    #[must_use]
    pub fn part_at(&self, position: i64) -> usize {
        if self.parts.len() <= 8 {
            return self.parts.iter().skip(1).take_while(|part| part.base() <= position).count();
        }
        self.parts.partition_point(|part| part.base() <= position) - 1
    }
}

impl Dim for Sections {
    fn elements(&self) -> i64 {
        self.n
    }

    fn shards(&self) -> i64 {
        self.shards
    }

    fn largest(&self) -> i64 {
        // A shard that has the largest one of each part; under one rule it is the first or the last.
        let all_largest =
            |last: bool| self.parts.iter().all(|part| part.is_largest(if last { part.shards() - 1 } else { 0 }));
        if all_largest(false) || all_largest(true) || self.parts.len() == 1 {
            return self.longest;
        }
        (0..self.shards).map(|index| self.extent(index)).max().unwrap_or(0)
    }

    #[inline]
    fn extent(&self, index: i64) -> i64 {
        self.begin(self.parts.len(), index)
    }

    #[inline]
    fn locate(&self, position: i64) -> (i64, i64) {
        let number = self.part_at(position);
        let part = &self.parts[number];
        let (shard, local) = part.locate(position);
        let index = part.canonical(shard);
        (index, self.begin(number, index) + local)
    }

    #[inline]
    fn position(&self, index: i64, local: i64) -> Option<i64> {
        match self.kept(index) {
            Some(begins) => {
                let number = if begins.len() <= 9 {
                    begins[1..].iter().take_while(|&&end| end <= local).count()
                } else {
                    begins.partition_point(|&begin| begin <= local) - 1
                };
                self.parts.get(number)?.position(index, local - begins[number])
            }
            None => {
                let mut rest = local;
                for part in &self.parts {
                    let room = part.room(index);
                    if rest < room {
                        return part.position(index, rest);
                    }
                    rest -= room;
                }
                None
            }
        }
    }
}
