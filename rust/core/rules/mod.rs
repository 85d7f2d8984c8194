//! Rule sets: many regular expressions, of which those that match a path are found in one pass over the path.
//!
//! The expressions are Python's, and what matches is what Python's `re` says. Those whose meaning is certain in the
//! syntax of the `regex` crate are compiled into automata, which read each character of a path once, whatever the
//! number of rules, and cannot backtrack. So neither a rule nor a path can make a look-up hang. The others, which need a
//! search that backtracks, are reported as left over.
//!
//! Python's classes beyond ASCII are its own: its `\w` is not Unicode's, its `\s` contains `\x1c`, its `(?i)k` finds the
//! Kelvin sign. So the caller says of what [`CharClass`] a character is, and a path is searched in up to three forms
//! (`translate::Group`); and in a path that ends in a newline, that one is told from the others (`translate::Ending`).

mod automaton;
mod class;
mod pattern;
mod size;
mod translate;

use std::{collections::HashMap, sync::OnceLock};

use crate::{
    error::Result,
    parallel::{self, Poll},
};
use automaton::Automaton;
pub use pattern::Pattern;
pub use size::{MOST_OF_ALL, MOST_REPEATED};
use translate::{Ending, Group, LAST_NEWLINE, TAKEN_FOR, Traits, Written, translate};

/// A character in the place of a lone surrogate, which Python has in its texts and Rust has not.
/// Python takes both for neither a digit, nor a word character, nor white space.
pub const SURROGATE: char = '\u{10ffff}';

/// The place in the path at which a rule has to match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchMode {
    /// Anywhere, as `re.search`.
    Search,
    /// At the beginning, as `re.match`.
    Match,
    /// From the beginning to the end, as `re.fullmatch`.
    FullMatch,
}

/// The class that Python takes a character beyond ASCII for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CharClass {
    /// A decimal digit, which is a word character as well.
    Digit,
    /// Another word character.
    Word,
    /// White space.
    Space,
    /// Anything else.
    Other,
}

impl CharClass {
    /// The character that stands for the class, and of which Python and the `regex` crate say that it is of it.
    fn character(self) -> char {
        match self {
            Self::Digit => '\u{660}',
            Self::Word => 'é',
            Self::Space => '\u{2003}',
            Self::Other => '€',
        }
    }

    /// The class that the `regex` crate takes a character for.
    fn of_regex(c: char) -> Self {
        static CLASSES: OnceLock<Option<Automaton>> = OnceLock::new();
        let classes = kept(&CLASSES, || Ok(Automaton::new([r"(?u:\d)", r"(?u:\w)", r"(?u:\s)"], b'\n')));
        let text = c.to_string();
        let found = classes
            .ok()
            .and_then(Option::as_ref)
            .and_then(|classes| classes.find(text.as_bytes(), &mut parallel::never).ok());
        // A digit is a word character too.
        match found.as_deref() {
            Some([0, ..]) => Self::Digit,
            Some([1, ..]) => Self::Word,
            Some([2, ..]) => Self::Space,
            _ => Self::Other,
        }
    }
}

/// The classes of a path's characters beyond ASCII.
struct Classes<'a> {
    known: HashMap<char, CharClass>,
    /// True if the `regex` crate takes all of them for the same.
    agree: bool,
    class_of: &'a mut dyn FnMut(char) -> CharClass,
}

impl<'a> Classes<'a> {
    fn new(class_of: &'a mut dyn FnMut(char) -> CharClass) -> Self {
        Self { known: HashMap::new(), agree: true, class_of }
    }

    /// The path as rules of this group search it; it has as many characters.
    fn form(&mut self, path: &str, group: Group) -> String {
        let stands_for = |c: char| match c {
            _ if c.is_ascii() || group == Group::Original => c,
            _ if group == Group::Folded && TAKEN_FOR.iter().any(|&(taken, _)| taken == c) => c,
            _ => self
                .known
                .entry(c)
                .or_insert_with(|| {
                    let class = (self.class_of)(c);
                    self.agree &= class == CharClass::of_regex(c);
                    class
                })
                .character(),
        };
        path.chars().map(stands_for).collect()
    }
}

/// The rules that match one path, by their position in the rule set.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The rules known to match, in order.
    pub matches: Vec<usize>,
    /// The rules that only a backtracking search could tell of this path, in order; none of them is among the matches.
    pub rest: Vec<usize>,
}

/// Python regular expressions that are searched for together.
///
/// # Examples
/// ```
/// use shardwise_core::{parallel, rules::{CharClass, MatchMode, RuleSet}};
///
/// let rules = RuleSet::new(&["dense.*kernel", "dense.*bias", "(?<!conv)bias"], MatchMode::Search);
/// let found = rules.find("dense_1/bias", &mut |_| CharClass::Other, &mut parallel::never)?;
/// assert_eq!((found.matches, found.rest), (vec![1], vec![2]));
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct RuleSet {
    mode: MatchMode,
    patterns: Vec<String>,
    traits: Vec<Option<Traits>>,
    /// The positions of those that are too large, with their size; see [`RuleSet::too_large`].
    too_large: Vec<(usize, u64)>,
    /// For printable ASCII paths.
    plain: OnceLock<Automata>,
    /// For other paths, by form and by ending.
    other: [[OnceLock<Automata>; 3]; 3],
}

impl RuleSet {
    /// The set of these rules; compiled when the first path of a kind is looked for.
    #[must_use]
    pub fn new(patterns: &[impl AsRef<str>], mode: MatchMode) -> Self {
        let mut traits = Vec::with_capacity(patterns.len());
        let mut too_large = Vec::new();
        let mut total = 0_u64;
        for (position, pattern) in patterns.iter().enumerate() {
            let found = translate(pattern.as_ref(), Ending::Plain, true, Written::Matches);
            let repeated = found.as_ref().map_or(0, |(text, _)| size::repeated(text));
            if repeated > MOST_REPEATED || total.saturating_add(repeated) > MOST_OF_ALL {
                too_large.push((position, repeated));
            } else {
                total += repeated;
            }
            traits.push(found.map(|(_, traits)| traits));
        }
        Self {
            mode,
            patterns: patterns.iter().map(|pattern| pattern.as_ref().to_owned()).collect(),
            traits,
            too_large,
            plain: OnceLock::new(),
            other: Default::default(),
        }
    }

    /// The rules that are too large for an automaton once their counted repetitions are written out, in order, each with the
    /// steps that these add: more than [`MOST_REPEATED`], or with those of the rules before it more than [`MOST_OF_ALL`].
    #[must_use]
    pub fn too_large(&self) -> &[(usize, u64)] {
        &self.too_large
    }

    /// The rules that only a backtracking search can find, whatever the path, in order: those that cannot be translated,
    /// and those too large for an automaton.
    ///
    /// # Errors
    /// What `poll` returns.
    pub fn backtracking(&self, poll: Poll<'_>) -> Result<Vec<usize>> {
        let mut rest = Vec::new();
        for group in 0..3 {
            rest.extend(&self.automata(group, 0, poll)?.rest);
        }
        rest.sort_unstable();
        rest.dedup();
        Ok(rest)
    }

    /// The rules that match the path, and those still to be tried. `class_of` is asked about characters beyond ASCII. A
    /// lone surrogate is [`SURROGATE`].
    ///
    /// # Errors
    /// What `poll` returns, which is called now and then; [`Error::TooMany`](crate::error::Error::TooMany) if there is no
    /// memory to search in.
    pub fn find(&self, path: &str, class_of: &mut dyn FnMut(char) -> CharClass, poll: Poll<'_>) -> Result<Found> {
        if is_plain(path) {
            let automata = kept(&self.plain, || Automata::new(self, None, Ending::Plain, |_| true, poll))?;
            let mut found = Found { matches: Vec::new(), rest: automata.rest.clone() };
            automata.find(path.as_bytes(), &mut found.matches, poll)?;
            return Ok(found);
        }
        self.find_other(path, class_of, poll)
    }

    /// True if the rules are compiled that a search for this path needs, as far as that is certain.
    #[must_use]
    pub fn is_compiled_for(&self, path: &str) -> bool {
        self.plain.get().is_some() && is_plain(path)
    }

    fn find_other(&self, path: &str, class_of: &mut dyn FnMut(char) -> CharClass, poll: Poll<'_>) -> Result<Found> {
        let mut classes = Classes::new(class_of);
        let forms = [classes.form(path, Group::Classed), classes.form(path, Group::Folded), path.to_owned()];
        let agree = classes.agree;
        let mut found = Found::default();
        for (group, form) in forms.iter().enumerate() {
            let mut search = |ending: usize, bytes: &[u8]| {
                let automata = self.automata(group, ending, poll)?;
                automata.find(bytes, &mut found.matches, poll)?;
                found.rest.extend(&automata.rest);
                Ok(())
            };
            if form.ends_with('\n') {
                search(1, form.as_bytes())?;
                let mut marked = form.clone().into_bytes();
                marked.pop();
                marked.push(LAST_NEWLINE);
                search(2, &marked)?;
            } else {
                search(0, form.as_bytes())?;
            }
        }
        // What depends on classes of which the two engines differ, on the version of Python, and on newlines of two kinds
        // where a `\r` would be taken for one.
        let has_lines = path.ends_with('\n') && path.contains('\r');
        let undecided = |position: &usize| {
            self.traits[*position].is_some_and(|traits| {
                (traits.group == Group::Original && traits.has_class && !agree)
                    || (traits.beyond_surrogates && path.contains(SURROGATE))
                    || (traits.has_not_boundary && path.is_empty())
                    || (traits.has_end && traits.has_line && has_lines)
            })
        };
        found.matches.retain(|position| !undecided(position));
        found.rest.extend((0..self.traits.len()).filter(undecided));
        for list in [&mut found.matches, &mut found.rest] {
            list.sort_unstable();
            list.dedup();
        }
        Ok(found)
    }

    /// The automata of the rules for one form of the path; of the endings, 0 is none, 1 a newline as it is, for the rules
    /// that have no `$`, and 2 a newline that is marked, for those that have.
    fn automata(&self, group: usize, ending: usize, poll: Poll<'_>) -> Result<&Automata> {
        kept(&self.other[group][ending], || {
            let group = [Group::Classed, Group::Folded, Group::Original][group];
            let written = if ending == 2 { Ending::Marked } else { Ending::Plain };
            let wanted = |traits: &Traits| match ending {
                0 => true,
                1 => !traits.has_end,
                _ => traits.has_end,
            };
            Automata::new(self, Some(group), written, wanted, poll)
        })
    }
}

/// The value of a cell, made first if it is empty. Two threads may both make it: if one waited for
/// the other, a process that forks meanwhile would have a child that waits for ever.
fn kept<T>(cell: &OnceLock<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(made) = cell.get() {
        return Ok(made);
    }
    let made = make()?;
    Ok(cell.get_or_init(|| made))
}

/// True if a path is of printable ASCII characters.
fn is_plain(path: &str) -> bool {
    !path.is_empty() && path.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// The rules that serve one kind of path, compiled together, in as few automata as memory allows.
#[derive(Debug)]
struct Automata {
    /// Each with the rules of its expressions.
    sets: Vec<(Automaton, Vec<usize>)>,
    /// The rules that no automaton serves.
    rest: Vec<usize>,
}

impl Automata {
    /// The rules of a group (for plain paths, of all) that are `wanted`.
    fn new(
        rules: &RuleSet,
        group: Option<Group>,
        ending: Ending,
        wanted: impl Fn(&Traits) -> bool,
        poll: Poll<'_>,
    ) -> Result<Self> {
        let mut served: Vec<(usize, String)> = Vec::new();
        let mut rest = Vec::new();
        for (position, pattern) in rules.patterns.iter().enumerate() {
            // Plain paths need no characters but ASCII, unless the rule names others.
            if rules.too_large.binary_search_by_key(&position, |&(at, _)| at).is_ok() {
                rest.push(position);
                continue;
            }
            let unicode =
                group.is_some() || rules.traits[position].is_some_and(|traits| traits.group == Group::Original);
            match translate(pattern, ending, unicode, Written::Matches) {
                None => rest.push(position),
                Some((_, traits)) if group.is_some_and(|group| group != traits.group) || !wanted(&traits) => {}
                Some((text, _)) => {
                    let flag = if unicode { "u" } else { "" };
                    served.push((
                        position,
                        match rules.mode {
                            MatchMode::Search => format!("(?{flag}:{text})"),
                            MatchMode::Match => format!(r"\A(?{flag}:{text})"),
                            MatchMode::FullMatch => format!(r"\A(?{flag}:{text})\z"),
                        },
                    ));
                }
            }
        }
        let mut automata = Self { sets: Vec::new(), rest };
        automata.compile(&served, ending, poll)?;
        automata.rest.sort_unstable();
        Ok(automata)
    }

    /// Compiles the rules together, or where they are too large together, each half by itself.
    fn compile(&mut self, served: &[(usize, String)], ending: Ending, poll: Poll<'_>) -> Result<()> {
        if served.is_empty() {
            return Ok(());
        }
        let line_terminator = if ending == Ending::Marked { LAST_NEWLINE } else { b'\n' };
        match (Automaton::new(served.iter().map(|(_, expression)| expression.as_str()), line_terminator), served) {
            (Some(set), _) => self.sets.push((set, served.iter().map(|(position, _)| *position).collect())),
            (None, [(position, _)]) => self.rest.push(*position),
            (None, _) => {
                poll()?;
                let (first, second) = served.split_at(served.len() / 2);
                self.compile(first, ending, poll)?;
                self.compile(second, ending, poll)?;
            }
        }
        Ok(())
    }

    /// Adds the rules that match; in order, if there is one automaton.
    fn find(&self, path: &[u8], matches: &mut Vec<usize>, poll: Poll<'_>) -> Result<()> {
        for (set, rules) in &self.sets {
            matches.extend(set.find(path, poll)?.into_iter().map(|expression| rules[expression]));
        }
        if self.sets.len() > 1 {
            matches.sort_unstable();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
