//! A Python regular expression as one of the `regex` crate, where both mean the same.
//!
//! The two syntaxes overlap without being equal: `a*+` is possessive in one and a repetition of a repetition in the
//! other, `[a&&b]` is a set of three characters or an intersection, `\Z` is an anchor or an error. So nothing is handed
//! over as it stands. The pattern is read by Python's rules, construct by construct, and written anew in the other
//! syntax; at the first construct outside the list below [`translate`] gives up: such a pattern needs a search that
//! backtracks, or is rare. What is written accepts the same paths. Where only that is asked it does not take the same
//! way: groups do not capture, and a lazy repetition is written as a greedy one, for which the set of matching paths is
//! the same. Where what is found is asked too ([`Written::Captures`]), groups capture and lazy repetitions stay lazy.
//!
//! | Python | here |
//! |---|---|
//! | characters, escaped punctuation, `\n \t \r \f \v \a`, `\xhh` and `\uhhhh` | the character, escaped |
//! | `.` | `[^\n]`, or any character under `(?s)` |
//! | `^` `\A`, and `^` under `(?m)` | `\A`, `(?m:^)` |
//! | `$` (the end, or before a newline there); under `(?m)` | see [`Ending`]; `(?m:$)` |
//! | `\Z` | `\z` |
//! | `(…)` `(?:…)` `(?P<name>…)` `(?#…)` | `(?:…)`, nothing |
//! | `*` `+` `?` `{n}` `{n,}` `{,m}` `{n,m}`, greedy or lazy | the greedy one |
//! | `[…]` of characters, ranges and the classes below | the same, each character escaped |
//! | `\d` `\w` `\s` `\D` `\W` `\S` `\b` `\B` | see [`Group`] |
//! | the flags `i`, `m`, `s`, `x`, `a`, `u` at the beginning; `(?ims-x:…)` | both cases of each letter; as above |
//!
//! Python is asked first whether the pattern is one at all, so what is an error there never arrives here.

use std::str::Chars;

/// A byte in the place of the newline at the end of a path, where `$` must tell it from the others.
/// It is not a byte of UTF-8, so no pattern can name it.
pub(super) const LAST_NEWLINE: u8 = 0xff;

/// The characters beyond ASCII that Python takes for ASCII letters when it ignores case, with these letters.
pub(super) const TAKEN_FOR: [(char, char); 4] = [('İ', 'i'), ('ı', 'i'), ('ſ', 's'), ('\u{212a}', 'k')];

/// The form of a path that a pattern is searched in. The forms differ in the characters beyond ASCII only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Group {
    /// Each such character is one that stands for its class (digit, other word character, space, anything else): the
    /// pattern names none of them, and Python and the `regex` crate agree on the classes of the four.
    #[default]
    Classed,
    /// As [`Group::Classed`], but the characters that Python takes for ASCII letters where it ignores case are left, for a
    /// part of the pattern may ignore case and another not.
    Folded,
    /// As it is: the pattern names characters beyond ASCII.
    Original,
}

/// The questions to a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// If it matches.
    Matches,
    /// The text that it matches, and those of its groups.
    Captures,
}

/// The end of the path, on which the meaning of `$` depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Not a newline: `$` is the end.
    Plain,
    /// A newline, which was replaced by [`LAST_NEWLINE`]; that is the line terminator, so `(?m:$)` is before it or at
    /// the end. Whatever matches a newline matches it. The anchors at the other newlines are those that take `\r` for
    /// one too, so no path with a `\r` must be searched for them.
    Marked,
}

/// The traits of a pattern that has been translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traits {
    /// The group in which it is searched.
    pub(super) group: Group,
    /// True if it has a `$` that is not a line's end, so that a last newline must be marked.
    pub(super) has_end: bool,
    /// True if it has an anchor at lines, `^` or `$` under `(?m)`.
    pub(super) has_line: bool,
    /// True if it has `\d`, `\w`, `\s` or `\b`, whose meaning beyond ASCII is Unicode's.
    pub(super) has_class: bool,
    /// True if it has `\B`, which depends on the version of Python for an empty path.
    pub(super) has_not_boundary: bool,
    /// True if it names a character beyond the surrogates, so that a range may hold those as well.
    pub(super) beyond_surrogates: bool,
}

/// The pattern in the syntax of the `regex` crate, or `None` where no linear search can tell what Python's would.
pub(super) fn translate(pattern: &str, ending: Ending, unicode: bool, written: Written) -> Option<(String, Traits)> {
    let mut flags = Flags::default();
    let mut body = pattern;
    while let Some(rest) = body.strip_prefix("(?")
        && let Some((letters, after)) = rest.split_once(')')
        && !letters.is_empty()
        && letters.bytes().all(|letter| b"aimsux".contains(&letter))
    {
        flags.set(letters, true)?;
        body = after;
    }
    let mut translator = Translator {
        rest: body.chars(),
        text: String::with_capacity(pattern.len() + 8),
        flags,
        open: Vec::new(),
        ending,
        unicode,
        written,
        beyond_ascii: false,
        folds: flags.ignore_case,
        ascii: flags.ascii,
        traits: Traits::default(),
    };
    translator.pattern()?;
    let Translator { text, mut traits, .. } = translator;
    traits.has_class &= !flags.ascii;
    traits.group = match (translator.beyond_ascii, translator.folds, flags.ascii) {
        // Which characters beyond ASCII fold to which is Python's own affair.
        (true, true, _) => return None,
        (true, false, _) => Group::Original,
        (false, true, false) => Group::Folded,
        (false, ..) => Group::Classed,
    };
    Some((text, traits))
}

#[derive(Clone, Copy, Default)]
pub(super) struct Flags {
    pub(super) ignore_case: bool,
    multi_line: bool,
    dot_all: bool,
    verbose: bool,
    ascii: bool,
}

impl Flags {
    fn set(&mut self, letters: &str, on: bool) -> Option<()> {
        for letter in letters.chars() {
            match letter {
                'i' => self.ignore_case = on,
                'm' => self.multi_line = on,
                's' => self.dot_all = on,
                'x' => self.verbose = on,
                'a' => self.ascii = on,
                'u' => {}
                _ => return None,
            }
        }
        Some(())
    }
}

pub(super) struct Translator<'pattern> {
    pub(super) rest: Chars<'pattern>,
    text: String,
    pub(super) flags: Flags,
    /// The flags outside of each group that is open.
    open: Vec<Flags>,
    ending: Ending,
    /// True if it is compiled for all characters, or for printable ASCII only.
    pub(super) unicode: bool,
    written: Written,
    beyond_ascii: bool,
    folds: bool,
    pub(super) ascii: bool,
    pub(super) traits: Traits,
}

impl Translator<'_> {
    fn pattern(&mut self) -> Option<()> {
        while let Some(c) = self.rest.next() {
            match c {
                ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c' if self.flags.verbose => {}
                '#' if self.flags.verbose => {
                    for skipped in self.rest.by_ref() {
                        if skipped == '\n' {
                            break;
                        }
                    }
                }
                '\\' => self.escape()?,
                '[' => self.class()?,
                '(' => self.group()?,
                ')' => {
                    self.flags = self.open.pop()?;
                    self.text.push(')');
                }
                '*' | '+' | '?' | '{' => self.repetition(c)?,
                '.' if self.flags.dot_all => self.class_text("(?s:.)", true),
                '.' => self.text.push_str(r"[^\n]"),
                '^' | '$' if self.flags.multi_line => self.line(c),
                '^' => self.text.push_str(r"\A"),
                '$' => {
                    self.traits.has_end = true;
                    self.text.push_str(if self.ending == Ending::Marked { "(?m:$)" } else { r"\z" });
                }
                '|' => self.text.push('|'),
                _ => self.literal(c),
            }
        }
        Some(())
    }

    /// Writes what matches one character; `newline` says whether it matches a newline too.
    pub(super) fn class_text(&mut self, text: &str, newline: bool) {
        if newline && self.ending == Ending::Marked {
            self.text.push_str(&format!(r"(?:{text}|(?-u:\xff))"));
        } else {
            self.text.push_str(text);
        }
    }

    /// The anchor at the beginning or at the end of a line.
    fn line(&mut self, sign: char) {
        self.traits.has_line = true;
        match self.ending {
            Ending::Plain => self.text.push_str(&format!("(?m:{sign})")),
            Ending::Marked => self.text.push_str(&format!("(?m:(?R:{sign})|{sign})")),
        }
    }

    /// The rest of an escape, after a backslash outside a class.
    fn escape(&mut self) -> Option<()> {
        match self.rest.next()? {
            'A' => self.text.push_str(r"\A"),
            'Z' => self.text.push_str(r"\z"),
            c @ ('b' | 'B') => {
                self.traits.has_class = true;
                self.traits.has_not_boundary |= c == 'B';
                self.text.push_str(match (c, self.ascii, self.ending) {
                    ('b', true, _) => r"(?-u:\b)",
                    ('b', false, _) => r"(?:\b)",
                    // It holds amid the bytes of a character too, where neither of Unicode's does.
                    (_, true, Ending::Plain) if self.unicode => r"(?:(?-u:\B)(?:\b|\B))",
                    (_, true, Ending::Plain) => r"(?-u:\B)",
                    (_, true, Ending::Marked) => r"(?:(?-u:\B)(?:\b|\B|\z|(?m:$)))",
                    (_, false, Ending::Plain) => r"(?:\B)",
                    // `\B` never holds beside what is not UTF-8, as the mark is not.
                    (_, false, Ending::Marked) => r"(?:\B|\z|(?m:$)\b{start-half})",
                });
            }
            c @ ('d' | 'w' | 's' | 'D' | 'W' | 'S') => {
                let text = self.perl_class(c);
                self.class_text(&text, matches!(c, 's' | 'D' | 'W'));
            }
            c => {
                let character = self.escaped(c)?;
                self.literal(character);
            }
        }
        Some(())
    }

    /// The character that a backslash and `c`, with what follows, mean.
    pub(super) fn escaped(&mut self, c: char) -> Option<char> {
        Some(match c {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'f' => '\x0c',
            'v' => '\x0b',
            'a' => '\x07',
            'x' => self.hexadecimal(2)?,
            'u' => self.hexadecimal(4)?,
            'U' => self.hexadecimal(8)?,
            c if c.is_ascii_alphanumeric() => return None,
            c => c,
        })
    }

    fn hexadecimal(&mut self, digits: usize) -> Option<char> {
        let text = self.rest.as_str().get(..digits).filter(|text| text.bytes().all(|b| b.is_ascii_hexdigit()))?;
        self.rest = self.rest.as_str()[digits..].chars();
        char::from_u32(u32::from_str_radix(text, 16).ok()?)
    }

    fn literal(&mut self, c: char) {
        let text = self.one(c);
        if self.flags.ignore_case && c.is_ascii_alphabetic() {
            let others = self.taken_for(c, c);
            self.text.push_str(&format!("[{}{}{others}]", c.to_ascii_lowercase(), c.to_ascii_uppercase()));
        } else {
            self.class_text(&text, c == '\n');
        }
    }

    /// One character, escaped.
    pub(super) fn one(&mut self, c: char) -> String {
        self.beyond_ascii |= !c.is_ascii();
        self.traits.beyond_surrogates |= c > '\u{d7ff}';
        if c.is_ascii_control() {
            format!(r"\x{:02x}", c as u32)
        } else if c.is_ascii_punctuation() && c != '<' && c != '>' {
            // `\<` and `\>` are the two escapes of punctuation that mean something else there.
            format!(r"\{c}")
        } else {
            c.to_string()
        }
    }

    /// The rest of a group, after its opening parenthesis.
    fn group(&mut self) -> Option<()> {
        let outside = self.flags;
        if self.eat("?#") {
            return self.rest.by_ref().find(|&c| c == ')').map(|_| ());
        }
        let mut opening = "(?:";
        if self.eat("?P<") {
            while self.rest.next()? != '>' {}
            opening = "(";
        } else if self.eat("?:") {
        } else if !self.rest.as_str().starts_with('?') {
            opening = "(";
        } else {
            // Flags of the group: those with an effect on what follows, not `a` and `u`, which Python wants alone.
            let (letters, after) = self.rest.as_str()[1..].split_once(':')?;
            let (on, off) = letters.split_once('-').unwrap_or((letters, ""));
            if letters.is_empty() || !letters.bytes().all(|letter| b"ims-x".contains(&letter)) {
                return None;
            }
            self.flags.set(on, true)?;
            self.flags.set(off, false)?;
            self.folds |= self.flags.ignore_case;
            self.rest = after.chars();
        }
        self.open.push(outside);
        self.text.push_str(if self.written == Written::Captures { opening } else { "(?:" });
        Some(())
    }

    /// The rest of a repetition, after `*`, `+`, `?` or `{`.
    fn repetition(&mut self, sign: char) -> Option<()> {
        if sign == '{' {
            let Some((low, high, rest)) = count(self.rest.as_str()) else {
                self.literal('{');
                return Some(());
            };
            let low = if low.is_empty() { "0" } else { low };
            match high {
                Some(high) => self.text.push_str(&format!("{{{low},{high}}}")),
                None => self.text.push_str(&format!("{{{low}}}")),
            }
            self.rest = rest.chars();
        } else {
            self.text.push(sign);
        }
        if self.eat("?") && self.written == Written::Captures {
            self.text.push('?');
        }
        // A second sign would make it possessive in some versions of Python and an error in others.
        let next = self.rest.as_str();
        let repeated = next.starts_with(['*', '+', '?']) || next.strip_prefix('{').is_some_and(|n| count(n).is_some());
        (!repeated).then_some(())
    }

    pub(super) fn eat(&mut self, text: &str) -> bool {
        let Some(rest) = self.rest.as_str().strip_prefix(text) else {
            return false;
        };
        self.rest = rest.chars();
        true
    }
}

/// The least and the greatest count that follow a brace, and what comes after them; without one, the brace is a plain
/// character. No greatest means that both are the same, and an empty one that there is none.
fn count(text: &str) -> Option<(&str, Option<&str>, &str)> {
    let (counts, rest) = text.split_once('}')?;
    let (low, high) = counts.split_once(',').map_or((counts, None), |(low, high)| (low, Some(high)));
    let is_number = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit());
    (is_number(low) && high.is_none_or(is_number) && !counts.is_empty()).then_some((low, high, rest))
}
