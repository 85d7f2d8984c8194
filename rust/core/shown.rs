//! Values in messages: short, whatever their length.

use std::fmt::{Debug, Display};

/// The most characters of a text in a message.
const LONGEST: usize = 120;

/// The most entries of a list in a message.
const MOST: usize = 8;

/// The text in quotes, with special characters escaped; of a long one both ends.
///
/// # Examples
/// ```
/// use shardwise_core::shown;
///
/// assert_eq!(shown::text("a\nb"), "\"a\\nb\"");
/// assert!(shown::text(&"a".repeat(1000)).chars().count() < 150);
/// ```
#[must_use]
pub fn text(text: &str) -> String {
    let half = LONGEST / 2;
    let (Some((head, _)), Some((tail, _))) = (text.char_indices().nth(half), text.char_indices().nth_back(half - 1))
    else {
        return format!("{text:?}");
    };
    if text.chars().nth(LONGEST).is_none() {
        format!("{text:?}")
    } else {
        format!("{:?}…{:?}", &text[..head], &text[tail..])
    }
}

/// The list in brackets; of a long one the first entries.
///
/// # Examples
/// ```
/// use shardwise_core::shown;
///
/// assert_eq!(shown::list(&[2, 4]), "[2, 4]");
/// assert_eq!(shown::list(&(0..1000).collect::<Vec<_>>()), "[0, 1, 2, 3, 4, 5, 6, 7, …]");
/// ```
#[must_use]
pub fn list<T: Debug>(entries: &[T]) -> String {
    joined(entries.iter().map(|entry| format!("{entry:?}")), entries.len())
}

/// The texts in brackets, each as [`text`] writes it; of a long list the first.
#[must_use]
pub fn texts(entries: &[impl AsRef<str>]) -> String {
    joined(entries.iter().map(|entry| text(entry.as_ref())), entries.len())
}

/// The question whether another name was meant, if one of the known ones is spelt almost like it; else nothing.
///
/// # Examples
/// ```
/// use shardwise_core::shown;
///
/// assert_eq!(shown::meant("modle", &["data", "model"]), "; did you mean \"model\"?");
/// assert_eq!(shown::meant("x", &["data", "model"]), "");
/// ```
#[must_use]
pub fn meant(name: &str, known: &[impl AsRef<str>]) -> String {
    let name: Vec<char> = name.chars().take(LONGEST).collect();
    let most = (name.len() / 3).min(3);
    let near = |other: &str| {
        let other: Vec<char> = other.chars().take(LONGEST).collect();
        Some(changes(&name, &other)).filter(|&count| count <= most && count > 0)
    };
    let nearest = known.iter().filter_map(|other| Some((near(other.as_ref())?, other.as_ref()))).min();
    nearest.map_or_else(String::new, |(_, other)| format!("; did you mean {}?", text(other)))
}

/// The number of characters to leave out, put in, replace or exchange with the next one that make
/// one name the other.
fn changes(one: &[char], other: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for i in 0..one.len() {
        let mut row = vec![i + 1];
        for j in 0..other.len() {
            let replaced = last[j] + usize::from(one[i] != other[j]);
            let mut least = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && one[i] == other[j - 1] && one[i - 1] == other[j] {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = last;
        last = row;
    }
    last[other.len()]
}

/// A number with its noun, in the plural if needed.
///
/// # Examples
/// ```
/// use shardwise_core::shown;
///
/// assert_eq!(shown::counted(&1, "axis", "axes"), "1 axis");
/// assert_eq!(shown::counted(&0, "axis", "axes"), "0 axes");
/// ```
#[must_use]
pub fn counted(count: &dyn Display, one: &str, several: &str) -> String {
    let count = count.to_string();
    let noun = if count == "1" { one } else { several };
    count + " " + noun
}

fn joined(entries: impl Iterator<Item = String>, len: usize) -> String {
    let entries: Vec<_> = entries.take(MOST).collect();
    format!("[{}{}]", entries.join(", "), if len > MOST { ", …" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_keep_both_ends() {
        let long: String = (0..LONGEST + 1).map(|i| if i < 60 { 'a' } else { 'é' }).collect();
        assert_eq!(text(&long), format!("{:?}…{:?}", "a".repeat(60), "é".repeat(60)));
        assert_eq!(text(&long[..LONGEST]), format!("{:?}", &long[..LONGEST]));
        assert_eq!(text(""), "\"\"");
    }

    #[test]
    fn long_lists_keep_their_beginning() {
        assert_eq!(list(&[0; MOST]), "[0, 0, 0, 0, 0, 0, 0, 0]");
        assert_eq!(list(&[0; MOST + 1]), "[0, 0, 0, 0, 0, 0, 0, 0, …]");
        assert_eq!(texts(&["a", "b"]), r#"["a", "b"]"#);
        assert!(texts(&vec!["x".repeat(10_000); 10_000]).len() < 2000);
    }
}
