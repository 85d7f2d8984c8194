//! Expressions that are searched for together, in pieces, so that a search can be interrupted.
//!
//! The `regex` crate searches in one go. What a byte costs is bounded by the size of the expressions, but with thousands of
//! repetitions, which rules may have, it is milliseconds, and a path of some kilobytes minutes. So its parts are used
//! directly: the automaton whose states are made as paths need them; and where that cannot go on, because it would make
//! new states all the time or because of a Unicode word boundary, the expressions' own states, all at once.

use std::{
    mem::swap,
    sync::{Mutex, PoisonError},
};

use regex_automata::{
    Anchored, MatchKind,
    hybrid::{
        LazyStateID,
        dfa::{Cache, DFA},
    },
    nfa::thompson::{Compiler, NFA, State, WhichCaptures},
    util::{look::LookMatcher, primitives::StateID, start, syntax},
};

use crate::{error::Result, parallel::Poll, room};

/// The most memory that the expressions may take compiled, in bytes.
const PROGRAM_LIMIT: usize = 16 << 20;

/// The most memory that the states found while searching may take, in bytes; past it they are forgotten.
const STATES_LIMIT: usize = 16 << 20;

/// The number of times that the states may be forgotten before they are no longer made, unless each
/// has served this many bytes.
const FORGOTTEN: usize = 3;
const BYTES_PER_STATE: usize = 10;

/// The work after which signals are looked for: states of expressions, each for a byte of the path. Some 10 ms.
const PIECE: usize = 1 << 21;

/// Expressions, compiled together.
#[derive(Debug)]
pub(super) struct Automaton {
    nfa: NFA,
    /// The lazy automaton, or `None` where the least that it needs would be too much.
    dfa: Option<DFA>,
    /// The cache that the last search has left. A search takes it away, so that others at the same
    /// time, such as that of a signal handler amid this one, make their own.
    cache: Mutex<Option<Cache>>,
}

impl Automaton {
    /// The expressions, or `None` if one is not valid, or if they take too much memory. Bytes need not be UTF-8.
    pub(super) fn new<'a>(expressions: impl IntoIterator<Item = &'a str>, line_terminator: u8) -> Option<Self> {
        let expressions: Vec<&str> = expressions.into_iter().collect();
        let mut looks = LookMatcher::new();
        looks.set_line_terminator(line_terminator);
        let config = NFA::config()
            .utf8(false)
            .nfa_size_limit(Some(PROGRAM_LIMIT))
            .which_captures(WhichCaptures::None)
            .look_matcher(looks);
        let written = syntax::Config::new().unicode(false).utf8(false).line_terminator(line_terminator);
        let nfa = Compiler::new().configure(config).syntax(written).build_many(&expressions).ok()?;
        let config = DFA::config()
            .match_kind(MatchKind::All)
            .unicode_word_boundary(true)
            .cache_capacity(STATES_LIMIT)
            .minimum_cache_clear_count(Some(FORGOTTEN))
            .minimum_bytes_per_state(Some(BYTES_PER_STATE));
        let dfa = DFA::builder().configure(config).build_from_nfa(nfa.clone()).ok();
        Some(Self { nfa, dfa, cache: Mutex::new(None) })
    }

    /// The numbers of the expressions that are found in the path, in their order.
    ///
    /// # Errors
    /// What `poll` returns; [`Error::TooMany`](crate::error::Error::TooMany) if there is no memory to search in.
    pub(super) fn find(&self, path: &[u8], poll: Poll<'_>) -> Result<Vec<usize>> {
        let mut found = Found { is_found: vec![false; self.nfa.pattern_len()], missing: self.nfa.pattern_len() };
        let is_done = match &self.dfa {
            Some(dfa) => {
                let kept = self.cache.lock().unwrap_or_else(PoisonError::into_inner).take();
                let mut cache = kept.unwrap_or_else(|| dfa.create_cache());
                let done = self.by_states_of_sets(dfa, &mut cache, path, &mut found, poll);
                *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = Some(cache);
                done?
            }
            None => false,
        };
        if !is_done {
            self.by_sets_of_states(path, &mut found, poll)?;
        }
        Ok((0..found.is_found.len()).filter(|&at| found.is_found[at]).collect())
    }

    /// The search with states that are made when first needed; says whether it came to its end.
    fn by_states_of_sets(
        &self,
        dfa: &DFA,
        cache: &mut Cache,
        path: &[u8],
        found: &mut Found,
        poll: Poll<'_>,
    ) -> Result<bool> {
        let begin = start::Config::new().anchored(Anchored::No);
        let Ok(mut state) = dfa.start_state(cache, &begin) else { return Ok(false) };
        // Each byte may cost as much as a new state.
        for piece in path.chunks((PIECE / self.nfa.states().len().max(1)).max(1)) {
            for &byte in piece {
                let Ok(next) = dfa.next_state(cache, state, byte) else { return Ok(false) };
                state = next;
                if state.is_tagged() {
                    if state.is_quit() {
                        return Ok(false);
                    }
                    if state.is_dead() || (state.is_match() && found.add_all(dfa, cache, state)) {
                        return Ok(true);
                    }
                }
            }
            if piece.len() < path.len() {
                poll()?;
            }
        }
        let Ok(end) = dfa.next_eoi_state(cache, state) else { return Ok(false) };
        if end.is_match() {
            found.add_all(dfa, cache, end);
        }
        Ok(!end.is_quit())
    }

    /// The search with all states that the expressions may be in, at each place of the path.
    fn by_sets_of_states(&self, path: &[u8], found: &mut Found, poll: Poll<'_>) -> Result<()> {
        let states = self.nfa.states().len();
        let (mut now, mut next) = (States::new(states)?, States::new(states)?);
        now.add(self.nfa.start_unanchored(), 0);
        let mut work = 0;
        for at in 0..=path.len() {
            let mut position = 0;
            while let Some(&id) = now.list.get(position) {
                position += 1;
                match self.nfa.state(id) {
                    State::ByteRange { trans } if trans.matches(path, at) => next.add(trans.next, at + 1),
                    State::Sparse(sparse) => sparse.matches(path, at).into_iter().for_each(|to| next.add(to, at + 1)),
                    State::Dense(dense) => dense.matches(path, at).into_iter().for_each(|to| next.add(to, at + 1)),
                    State::Look { look, next: to } if self.nfa.look_matcher().matches(*look, path, at) => {
                        now.add(*to, at);
                    }
                    State::Union { alternates } => alternates.iter().for_each(|&to| now.add(to, at)),
                    State::BinaryUnion { alt1, alt2 } => [*alt1, *alt2].into_iter().for_each(|to| now.add(to, at)),
                    State::Capture { next: to, .. } => now.add(*to, at),
                    State::Match { pattern_id } if found.add(pattern_id.as_usize()) => return Ok(()),
                    _ => {}
                }
            }
            work += position;
            if work >= PIECE {
                poll()?;
                work = 0;
            }
            swap(&mut now, &mut next);
            next.list.clear();
        }
        Ok(())
    }
}

/// The expressions that are found.
struct Found {
    is_found: Vec<bool>,
    missing: usize,
}

impl Found {
    /// Adds one; says whether all are found.
    fn add(&mut self, expression: usize) -> bool {
        self.missing -= usize::from(!self.is_found[expression]);
        self.is_found[expression] = true;
        self.missing == 0
    }

    /// Adds those of a state that matches; says whether all are found.
    fn add_all(&mut self, dfa: &DFA, cache: &Cache, state: LazyStateID) -> bool {
        (0..dfa.match_len(cache, state)).fold(false, |_, at| self.add(dfa.match_pattern(cache, state, at).as_usize()))
    }
}

/// States of expressions at one place of a path.
struct States {
    list: Vec<StateID>,
    /// For each state, one more than the last place at which it was added.
    last: Vec<usize>,
}

impl States {
    fn new(count: usize) -> Result<Self> {
        let what = "the states of the rules";
        Ok(Self { list: room::list(count, what)?, last: room::filled(0, count, what)? })
    }

    fn add(&mut self, id: StateID, at: usize) {
        let last = &mut self.last[id.as_usize()];
        if *last != at + 1 {
            *last = at + 1;
            self.list.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::parallel::never;
    use proptest::prelude::*;

    fn compiled(expressions: &[&str]) -> Automaton {
        Automaton::new(expressions.iter().copied(), b'\n').unwrap()
    }

    fn nothing_found(expressions: &[&str]) -> Found {
        Found { is_found: vec![false; expressions.len()], missing: expressions.len() }
    }

    #[test]
    fn bytes_beyond_ascii_beside_a_unicode_word_boundary_are_searched_state_by_state() {
        let expressions = [r"(?u:a\b)", r"(?u:\bé)", "(?u:é$)", r"(?u:\Bé)"];
        let automaton = compiled(&expressions);
        let mut found = nothing_found(&expressions);
        let dfa = automaton.dfa.as_ref().unwrap();
        let path = "aé".as_bytes();
        assert!(!automaton.by_states_of_sets(dfa, &mut dfa.create_cache(), path, &mut found, &mut never).unwrap());
        assert_eq!(automaton.find(path, &mut never), Ok(vec![2, 3]));
        assert_eq!(automaton.find("a é".as_bytes(), &mut never), Ok(vec![0, 1, 2]));
    }

    #[test]
    fn a_long_search_can_be_interrupted_and_made_again() {
        let large = compiled(&["[a-z]{2,20000}$", "b"]);
        let path = [b"a".repeat(4_000), b"!".to_vec()].concat();
        for by_dfa in [true, false] {
            let (mut left, mut found) = (3, nothing_found(&["", ""]));
            let mut interrupted = || {
                left -= 1;
                if left == 0 { Err(Error::Interrupted) } else { Ok(()) }
            };
            let done = if by_dfa {
                large.find(&path, &mut interrupted).map(drop)
            } else {
                large.by_sets_of_states(&path, &mut found, &mut interrupted)
            };
            assert_eq!(done, Err(Error::Interrupted), "by_dfa: {by_dfa}");
        }
        assert_eq!(large.find(b"ab", &mut never), Ok(vec![0, 1]));
    }

    #[test]
    fn what_is_called_amid_a_search_may_search() {
        let large = compiled(&["[a-z]{2,20000}$", "b"]);
        let mut inner = Vec::new();
        let mut search = || {
            inner.push(large.find(b"ab!", &mut never)?);
            Ok(())
        };
        assert_eq!(large.find(&b"a".repeat(1_000), &mut search), Ok(vec![0]));
        assert!(!inner.is_empty() && inner.iter().all(|found| found == &[1]));
    }

    proptest! {
        #[test]
        fn both_searches_find_the_same(
            expressions in prop::collection::vec(r"(\^|\\A)?([ab.\n]|\[\^a\]|\(a\|b\)|\\b|\(\?u:\\w\)|é){1,5}[*+?]?(\$|\\z|\(\?m:\$\))?", 1..5),
            path in "[abé\n ]{0,12}",
        ) {
            let expressions: Vec<&str> = expressions.iter().map(String::as_str).collect();
            let Some(automaton) = Automaton::new(expressions.iter().copied(), b'\n') else { return Ok(()) };
            let mut found = nothing_found(&expressions);
            automaton.by_sets_of_states(path.as_bytes(), &mut found, &mut never).unwrap();
            let by_sets: Vec<usize> = (0..expressions.len()).filter(|&at| found.is_found[at]).collect();
            prop_assert_eq!(automaton.find(path.as_bytes(), &mut never), Ok(by_sets));
        }
    }
}
