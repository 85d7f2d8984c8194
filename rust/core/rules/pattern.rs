//! One regular expression, and all that it matches in a path: what a substitution needs.
//!
//! As for rules, the expression is Python's and the search linear. Of the ways in which an expression can match, the
//! `regex` crate prefers the same as Python, so that the matches and their groups are the same, with two exceptions, and
//! an expression for which they could matter is refused: a repetition of what may be empty, of which the two differ in
//! when they stop; and an expression that may prefer an empty match to a longer one, after which Python looks for the
//! longer one at the same place.

use regex_automata::{
    Input,
    nfa::thompson::{
        NFA,
        pikevm::{Builder, PikeVM},
    },
    util::{primitives::NonMaxUsize, syntax},
};
use regex_syntax::hir::{Hir, HirKind};

use super::{
    CharClass, Classes, SURROGATE, is_plain,
    size::{MOST_REPEATED, repeated},
    translate::{Ending, Group, Traits, Written, translate},
};

/// The most memory that an expression may take compiled, in bytes: what a search costs at most for each byte of a path.
const PROGRAM_LIMIT: usize = 1 << 20;

const BACKTRACKS: &str = "it uses look-around, a back-reference or another construct that only a backtracking search can \
                          find";
const TOO_LARGE: &str = "it is too large: its counted repetitions, such as {1,50}, come to more than 1,000 steps once they are \
                         written out; use + or * instead";
const REPEATS_EMPTY: &str = "it repeats what may be empty";
const PREFERS_EMPTY: &str = "it may match nothing where it could match something: a lazy repetition, or an alternative that may be empty before \
     another";

/// A match: where it begins and ends in the path, in characters, and after it each group, `None` for one that has no part
/// in the match.
pub type Spans = Vec<Option<(usize, usize)>>;

/// A Python regular expression whose matches are found in linear time.
///
/// # Examples
/// ```
/// use shardwise_core::rules::{CharClass, Pattern};
///
/// let pattern = Pattern::new(r"(\w)\.")?;
/// let found = pattern.matches("a.bc.", &mut |_| CharClass::Other);
/// assert_eq!(found.unwrap(), [vec![Some((0, 2)), Some((0, 1))], vec![Some((3, 5)), Some((3, 4))]]);
/// assert!(Pattern::new("(?=a)").is_err());
/// # Ok::<(), &str>(())
/// ```
#[derive(Debug)]
pub struct Pattern {
    traits: Traits,
    machine: PikeVM,
}

impl Pattern {
    /// The pattern.
    ///
    /// # Errors
    /// The reason for which the expression is refused.
    pub fn new(pattern: &str) -> Result<Self, &'static str> {
        let (text, traits) = translate(pattern, Ending::Plain, true, Written::Captures).ok_or(BACKTRACKS)?;
        let written = syntax::Config::new().unicode(false).utf8(false);
        let text = format!("(?u:{text})");
        if repeated(&text) > MOST_REPEATED {
            return Err(TOO_LARGE);
        }
        let hir = syntax::parse_with(&text, &written).map_err(|_| TOO_LARGE)?;
        if repeats_empty(&hir) {
            return Err(REPEATS_EMPTY);
        }
        if !prefers_longer(&hir) {
            return Err(PREFERS_EMPTY);
        }
        let config = NFA::config().utf8(true).nfa_size_limit(Some(PROGRAM_LIMIT));
        let machine = Builder::new().thompson(config).syntax(written).build(&text).map_err(|_| TOO_LARGE)?;
        Ok(Self { traits, machine })
    }

    /// All matches in the path that a substitution replaces, from left to right: after a match the next is looked for at its
    /// end, and an empty one is not taken where another empty one ended. `class_of` is asked about characters beyond ASCII.
    /// `None` if only Python can tell: what a `$` before a last newline matches, and classes of characters of which the two
    /// engines differ.
    pub fn matches(&self, path: &str, class_of: &mut dyn FnMut(char) -> CharClass) -> Option<Vec<Spans>> {
        let Traits { group, has_end, has_class, has_not_boundary, beyond_surrogates, .. } = self.traits;
        if (has_end && path.ends_with('\n'))
            || (beyond_surrogates && path.contains(SURROGATE))
            || (has_not_boundary && path.is_empty())
        {
            return None;
        }
        let mut form = path.to_owned();
        if !is_plain(path) {
            let mut classes = Classes::new(class_of);
            form = classes.form(path, group);
            if group == Group::Original && has_class {
                classes.form(path, Group::Classed);
                if !classes.agree {
                    return None;
                }
            }
        }
        Some(self.found(&form))
    }

    fn found(&self, path: &str) -> Vec<Spans> {
        let mut cache = self.machine.create_cache();
        let mut slots = vec![None; 2 * self.machine.get_nfa().group_info().all_group_len()];
        // How many characters there are before each byte that begins one, and before the end.
        let mut count = vec![0; path.len() + 1];
        for (number, (at, _)) in path.char_indices().enumerate() {
            count[at] = number;
        }
        count[path.len()] = path.chars().count();
        let mut found = Vec::new();
        let (mut start, mut after_empty) = (0, false);
        while start <= path.len() {
            let input = Input::new(path).range(start..);
            if self.machine.search_slots(&mut cache, &input, &mut slots).is_none() {
                break;
            }
            let span = |pair: &[Option<NonMaxUsize>]| match pair {
                [Some(from), Some(to)] => Some((from.get(), to.get())),
                _ => None,
            };
            let groups: Vec<_> = slots.chunks_exact(2).map(span).collect();
            let Some((begin, end)) = groups[0] else { break };
            if begin == end && begin == start && after_empty {
                start += path[start..].chars().next().map_or(1, char::len_utf8);
                after_empty = false;
                continue;
            }
            found.push(groups.into_iter().map(|span| span.map(|(from, to)| (count[from], count[to]))).collect());
            (start, after_empty) = (end, begin == end);
        }
        found
    }
}

/// True if something is repeated, more than once, that may be empty.
fn repeats_empty(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Repetition(repetition) => {
            (repetition.max != Some(1) && may_be_empty(&repetition.sub)) || repeats_empty(&repetition.sub)
        }
        HirKind::Capture(capture) => repeats_empty(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().any(repeats_empty),
        _ => false,
    }
}

/// True if an empty match is what an expression prefers least of all.
fn prefers_longer(hir: &Hir) -> bool {
    if !may_be_empty(hir) || hir.properties().maximum_len() == Some(0) {
        return true;
    }
    match hir.kind() {
        HirKind::Repetition(repetition) => repetition.greedy && prefers_longer(&repetition.sub),
        HirKind::Capture(capture) => prefers_longer(&capture.sub),
        HirKind::Concat(parts) => parts.iter().all(prefers_longer),
        HirKind::Alternation(parts) => {
            parts.split_last().is_some_and(|(last, first)| !first.iter().any(may_be_empty) && prefers_longer(last))
        }
        _ => true,
    }
}

fn may_be_empty(hir: &Hir) -> bool {
    hir.properties().minimum_len() == Some(0)
}
