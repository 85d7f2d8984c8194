//! Classes of characters in a pattern, `[…]`, `\d`, `\w` and `\s`, in the syntax of the `regex` crate.

use super::translate::{TAKEN_FOR, Translator};

/// A class, while it is read: what is written, and whether a newline is in it.
struct Class {
    text: String,
    newline: bool,
}

impl Translator<'_> {
    /// `\d`, `\w`, `\s` or their complement, as Python means them.
    pub(super) fn perl_class(&mut self, letter: char) -> String {
        self.traits.has_class = true;
        let complement = if letter.is_ascii_uppercase() { "^" } else { "" };
        let members = match (letter.to_ascii_lowercase(), self.ascii || !self.unicode) {
            ('d', true) => "0-9",
            ('w', true) => "0-9A-Za-z_",
            ('s', true) if self.ascii => r"\x09-\x0d\x20",
            ('s', true) => r"\x09-\x0d\x1c-\x20",
            ('d', false) => r"\d",
            ('w', false) => r"\w",
            _ => r"\s\x1c-\x1f",
        };
        format!("[{complement}{members}]")
    }

    /// The rest of a class, after its opening bracket, up to and with its closing one.
    pub(super) fn class(&mut self) -> Option<()> {
        let complement = self.eat("^");
        let mut class = Class { text: String::new(), newline: false };
        // A bracket that comes first is a member.
        let mut member = self.rest.next()?;
        loop {
            let first = self.member(member, &mut class)?;
            let mut ahead = self.rest.as_str().chars();
            if ahead.next() == Some('-') && ahead.next() != Some(']') {
                self.eat("-");
                let end = self.rest.next()?;
                let (Some(first), Some(last)) = (first, self.single(end)?) else { return None };
                self.range(first, last, &mut class);
            } else if let Some(c) = first {
                self.range(c, c, &mut class);
            }
            member = self.rest.next()?;
            if member == ']' {
                let sign = if complement { "^" } else { "" };
                let text = format!("[{sign}{}]", class.text);
                self.class_text(&text, class.newline != complement);
                return Some(());
            }
        }
    }

    /// One member of a class: the character, if it is one, or else `None` after it was written.
    fn member(&mut self, c: char, class: &mut Class) -> Option<Option<char>> {
        if c == '\\'
            && let Some(letter @ ('d' | 'w' | 's' | 'D' | 'W' | 'S')) = self.rest.clone().next()
        {
            self.rest.next();
            let text = self.perl_class(letter);
            class.text.push_str(&text);
            class.newline |= matches!(letter, 's' | 'D' | 'W');
            return Some(None);
        }
        self.single(c)
    }

    /// A member that must be one character.
    fn single(&mut self, c: char) -> Option<Option<char>> {
        if c != '\\' {
            return Some(Some(c));
        }
        let next = self.rest.next()?;
        self.escaped(next).map(Some)
    }

    fn range(&mut self, first: char, last: char, class: &mut Class) {
        class.newline |= (first..=last).contains(&'\n');
        let (from, to) = (self.one(first), self.one(last));
        class.text.push_str(&if first == last { from } else { format!("{from}-{to}") });
        if self.flags.ignore_case {
            for (low, high, other) in [('a', 'z', 'A'), ('A', 'Z', 'a')] {
                let (from, to) = (first.max(low), last.min(high));
                if from <= to {
                    let fold = |c: char| char::from(c as u8 - low as u8 + other as u8);
                    class.text.push_str(&format!("{}-{}", fold(from), fold(to)));
                }
            }
            class.text.push_str(&self.taken_for(first, last));
        }
    }

    /// The characters beyond ASCII that Python takes for letters of a range when it ignores case.
    pub(super) fn taken_for(&self, first: char, last: char) -> String {
        let taken = |&(_, letter): &(char, char)| {
            (first..=last).contains(&letter) || (first..=last).contains(&letter.to_ascii_uppercase())
        };
        let is_wanted = self.unicode && !self.ascii;
        TAKEN_FOR.iter().filter(|pair| is_wanted && taken(pair)).map(|&(c, _)| c).collect()
    }
}
