//! The protocol buffer wire format: fields of a number, a type and a value, one after the other.
//!
//! The reader borrows from the bytes, keeps nothing and knows its offset, so that an error can name the byte. Fields it
//! is not asked about are skipped, groups of them too, down to [`MAX_DEPTH`]: the policy of every reader of protocol
//! buffers towards messages of a newer version. A known field of another wire type is an error.

use super::{Error, Result};
use crate::shown;

/// The most levels of unknown groups in each other.
const MAX_DEPTH: usize = 100;

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const GROUP: u64 = 3;
const END_GROUP: u64 = 4;
const FIXED32: u64 = 5;

/// Reads the fields of one message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    message: &'static str,
    bytes: &'a [u8],
    /// The offset of `bytes` in the whole message.
    at: usize,
}

/// One field of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field<'a> {
    /// The number of the field.
    pub(super) number: u64,
    message: &'static str,
    at: usize,
    value: Value<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Value<'a> {
    Varint(u64),
    Bytes(Reader<'a>),
    Skipped,
}

impl<'a> Reader<'a> {
    /// A reader of a whole message.
    pub(super) fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        Self { message, bytes, at: 0 }
    }

    /// The next field, if there is one.
    pub(super) fn next(&mut self) -> Result<Option<Field<'a>>> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let at = self.at;
        let (number, wire_type) = self.tag()?;
        let value = match wire_type {
            VARINT => Value::Varint(self.varint()?),
            LENGTH => Value::Bytes(self.length_delimited()?),
            END_GROUP => return Err(self.error(at, "the end of a group that did not begin")),
            _ => {
                self.skip(number, wire_type)?;
                Value::Skipped
            }
        };
        Ok(Some(Field { number, message: self.message, at, value }))
    }

    fn error(&self, at: usize, problem: impl Into<String>) -> Error {
        Error::Wire { message: self.message, at, problem: problem.into() }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((head, rest)) = self.bytes.split_at_checked(count) else {
            return Err(self.error(
                self.at,
                format!("{} needed, {} left", shown::counted(&count, "byte", "bytes"), self.bytes.len()),
            ));
        };
        self.bytes = rest;
        self.at += count;
        Ok(head)
    }

    #[inline]
    fn varint(&mut self) -> Result<u64> {
        // Of one byte, as most are.
        if let [byte @ ..0x80, rest @ ..] = self.bytes {
            self.bytes = rest;
            self.at += 1;
            return Ok(u64::from(*byte));
        }
        self.long_varint()
    }

    #[inline(never)]
    fn long_varint(&mut self) -> Result<u64> {
        let start = self.at;
        let mut value = 0;
        for (position, &byte) in self.bytes.iter().take(10).enumerate() {
            if position == 9 && byte > 1 {
                return Err(self.error(start, "a number over 64 bits"));
            }
            value |= u64::from(byte & 0x7f) << (7 * position);
            if byte < 0x80 {
                self.bytes = &self.bytes[position + 1..];
                self.at += position + 1;
                return Ok(value);
            }
        }
        Err(self.error(start, if self.bytes.len() < 10 { "a number that is cut off" } else { "a number over 64 bits" }))
    }

    fn tag(&mut self) -> Result<(u64, u64)> {
        let at = self.at;
        let tag = self.varint()?;
        if tag >> 3 == 0 || tag > u64::from(u32::MAX) {
            return Err(self.error(at, format!("no field has the number {}", tag >> 3)));
        }
        Ok((tag >> 3, tag & 7))
    }

    fn length_delimited(&mut self) -> Result<Self> {
        let at = self.at;
        let length = self.varint()?;
        let left = self.bytes.len();
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= left)
            .ok_or_else(|| self.error(at, format!("a length of {length} with {left} bytes left")))?;
        let at = self.at;
        Ok(Self { bytes: self.take(length)?, at, ..*self })
    }

    /// Skips the value of a field that is not of interest.
    fn skip(&mut self, number: u64, wire_type: u64) -> Result<()> {
        let mut open = Vec::new();
        let (mut number, mut wire_type) = (number, wire_type);
        loop {
            match wire_type {
                VARINT => drop(self.varint()?),
                FIXED64 => drop(self.take(8)?),
                LENGTH => drop(self.length_delimited()?),
                FIXED32 => drop(self.take(4)?),
                GROUP if open.len() == MAX_DEPTH => {
                    return Err(self.error(self.at, format!("groups more than {MAX_DEPTH} deep")));
                }
                GROUP => open.push(number),
                END_GROUP if open.pop() == Some(number) => {}
                END_GROUP => return Err(self.error(self.at, "the end of another group than the one that is open")),
                _ => return Err(self.error(self.at, format!("no wire type has the number {wire_type}"))),
            }
            if open.is_empty() {
                return Ok(());
            }
            (number, wire_type) = self.tag()?;
        }
    }
}

impl<'a> Field<'a> {
    fn wrong_type(&self, wanted: &str) -> Error {
        let problem = format!("field {} is of another wire type than {wanted}", self.number);
        Error::Wire { message: self.message, at: self.at, problem }
    }

    /// The value as a number.
    pub(super) fn varint(&self) -> Result<u64> {
        match self.value {
            Value::Varint(value) => Ok(value),
            _ => Err(self.wrong_type("a number")),
        }
    }

    /// The value as a message called `name`.
    pub(super) fn message(&self, name: &'static str) -> Result<Reader<'a>> {
        match self.value {
            Value::Bytes(reader) => Ok(Reader { message: name, ..reader }),
            _ => Err(self.wrong_type("a message")),
        }
    }

    /// The value as a text.
    pub(super) fn text(&self) -> Result<&'a str> {
        let Value::Bytes(reader) = self.value else { return Err(self.wrong_type("a text")) };
        std::str::from_utf8(reader.bytes).map_err(|error| {
            let problem = format!("field {} is not valid UTF-8", self.number);
            reader.error(reader.at + error.valid_up_to(), problem)
        })
    }

    /// Appends the value, one number or a packed run of them, to `numbers`.
    pub(super) fn numbers(&self, numbers: &mut Vec<i64>) -> Result<()> {
        match self.value {
            Value::Varint(value) => numbers.push(value.cast_signed()),
            Value::Bytes(mut reader) => {
                numbers.reserve(reader.bytes.iter().filter(|&&byte| byte < 0x80).count());
                while !reader.bytes.is_empty() {
                    numbers.push(reader.varint()?.cast_signed());
                }
            }
            Value::Skipped => return Err(self.wrong_type("a number")),
        }
        Ok(())
    }

    /// An error at this field.
    pub(super) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Wire { message: self.message, at: self.at, problem: problem.into() }
    }
}

/// Appends a number.
#[inline]
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a field that is a number, unless it is zero.
pub(super) fn put_number(out: &mut Vec<u8>, field: u64, value: u64) {
    if value != 0 {
        put_varint(out, field << 3 | VARINT);
        put_varint(out, value);
    }
}

/// Appends a field of bytes: a text or a message.
#[inline]
pub(super) fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(out, field << 3 | LENGTH);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Appends a field that is a text, unless it is empty.
pub(super) fn put_text(out: &mut Vec<u8>, field: u64, text: &str) {
    if !text.is_empty() {
        put_bytes(out, field, text.as_bytes());
    }
}

/// Appends a packed field of numbers, unless there are none.
pub(super) fn put_packed(out: &mut Vec<u8>, field: u64, numbers: impl Iterator<Item = i64> + Clone) {
    let length: usize = numbers.clone().map(|number| varint_len(number.cast_unsigned())).sum();
    if length > 0 {
        put_varint(out, field << 3 | LENGTH);
        put_varint(out, length as u64);
        out.reserve(length);
        numbers.for_each(|number| put_varint(out, number.cast_unsigned()));
    }
}

fn varint_len(value: u64) -> usize {
    (u64::BITS - (value | 1).leading_zeros()).div_ceil(7) as usize
}
