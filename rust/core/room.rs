//! Room for what is to be listed: asked for before a collection grows, since one that grows by itself aborts the process
//! where there is no memory.

use std::{
    collections::{BinaryHeap, HashMap, HashSet, TryReserveError},
    fmt::Display,
    hash::{BuildHasher, Hash},
};

use crate::error::{Error, Result};

/// A collection that can be asked for room.
pub(crate) trait Room {
    /// Room for `more` entries and, as a rule, some beyond them.
    fn reserved(&mut self, more: usize) -> std::result::Result<(), TryReserveError>;

    /// Makes room for `more` entries; `what` they are is said if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`].
    fn room(&mut self, more: usize, what: impl Display) -> Result<()> {
        self.reserved(more).map_err(|_| none(what))
    }
}

impl<T> Room for Vec<T> {
    fn reserved(&mut self, more: usize) -> std::result::Result<(), TryReserveError> {
        self.try_reserve(more)
    }
}

impl<T> Room for BinaryHeap<T> {
    fn reserved(&mut self, more: usize) -> std::result::Result<(), TryReserveError> {
        self.try_reserve(more)
    }
}

impl<K: Eq + Hash, V, S: BuildHasher> Room for HashMap<K, V, S> {
    fn reserved(&mut self, more: usize) -> std::result::Result<(), TryReserveError> {
        self.try_reserve(more)
    }
}

impl<T: Eq + Hash, S: BuildHasher> Room for HashSet<T, S> {
    fn reserved(&mut self, more: usize) -> std::result::Result<(), TryReserveError> {
        self.try_reserve(more)
    }
}

/// An empty list with room for exactly `count` entries, which may be more than can be counted; `what` they are is said if
/// there is none.
///
/// # Errors
///
/// [`Error::TooMany`].
pub(crate) fn list<T>(count: impl TryInto<usize>, what: impl Display) -> Result<Vec<T>> {
    let mut list = Vec::new();
    match count.try_into() {
        Ok(count) if list.try_reserve_exact(count).is_ok() => Ok(list),
        _ => Err(none(what)),
    }
}

/// `count` entries of `value`.
///
/// # Errors
///
/// [`Error::TooMany`].
pub(crate) fn filled<T: Clone>(value: T, count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut all = list(count, what)?;
    all.resize(count, value);
    Ok(all)
}

/// There is no room for `what`.
pub(crate) fn none(what: impl Display) -> Error {
    Error::TooMany { what: what.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_no_room_for_is_named() {
        let mut many: Vec<u64> = Vec::new();
        assert_eq!(many.room(usize::MAX, "the edges"), Err(Error::TooMany { what: "the edges".to_owned() }));
        assert_eq!(list::<u64>(-1_i64, format_args!("{} runs", 3)), Err(Error::TooMany { what: "3 runs".to_owned() }));
        assert_eq!(filled(0_u64, usize::MAX / 2, "loads"), Err(Error::TooMany { what: "loads".to_owned() }));
        let mut pairs: HashMap<u64, u64> = HashMap::new();
        assert_eq!(pairs.room(usize::MAX, "pairs"), Err(Error::TooMany { what: "pairs".to_owned() }));
    }

    #[test]
    fn there_is_room_for_what_was_asked() {
        let mut few: Vec<u8> = list(3_i64, "numbers").unwrap();
        assert!(few.is_empty() && few.capacity() >= 3);
        few.room(5, "numbers").unwrap();
        assert!(few.capacity() >= 5);
        assert_eq!(filled(7, 2, "sevens").unwrap(), [7, 7]);
    }
}
