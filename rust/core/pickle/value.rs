//! The contents of a pickle, in tables.

use std::borrow::Cow;

use crate::{
    error::Result,
    room::{self, Room as _},
};

/// The list that there may be no room for here.
pub(super) const VALUES: &str = "the values of a pickle";

/// The longest input in bytes; positions in it are held in 32 bits.
pub const MAX_BYTES: usize = u32::MAX as usize - 1;

/// The longest integer in bytes.
pub const MAX_INTEGER: usize = 64;

/// The longest module or name of a global in bytes: such texts are made anew for each global.
pub const MAX_NAME: usize = 1024;

/// The number of a value in its [`Pickle`].
pub type Id = u32;

/// A range of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub(super) start: u32,
    pub(super) length: u32,
}

/// A value that an opcode left on the stack. Containers and records are numbers to ask the
/// [`Pickle`] for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// Python's `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A longer one: little-endian two's complement.
    Long(Span),
    /// A float.
    Float(f64),
    /// A text, which may not be valid UTF-8.
    Text(Span),
    /// Bytes, or a bytearray.
    Bytes(Span),
    /// A tuple.
    Tuple(Span),
    /// A list.
    List(u32),
    /// A dict, as its pairs in the order of writing; a key may come twice.
    Dict(u32),
    /// A set or a frozenset.
    Set(u32),
    /// A name of the input, or an attribute of one that its `getattr` would give: `Class.Nested`.
    Global(u32),
    /// `getattr` itself, which names attributes of globals and is refused anywhere else.
    Getattr,
    /// A call, or an object made of its class.
    Record(u32),
    /// A value that the container of the input holds: the id says which.
    Persistent(Id),
}

/// A call that was noted down and not made, and what would then have been done to its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The callable: a [`Value::Global`].
    pub callee: Id,
    /// The arguments of the call: a tuple.
    pub arguments: Id,
    /// The keyword arguments of the call: a dict.
    pub keywords: Option<Id>,
    /// The state that the result would be given.
    pub state: Option<Id>,
    /// The dict, by its number, of the pairs that would be set on it.
    pub(super) items: Option<u32>,
    /// The list, by its number, of what would be appended to it.
    pub(super) elements: Option<u32>,
}

/// The contents of an input, in tables; a value is never copied, so that what is shared stays
/// shared.
#[derive(Debug)]
pub struct Pickle<'a> {
    pub(super) input: &'a [u8],
    pub(super) values: Vec<Value>,
    pub(super) tuples: Vec<Id>,
    pub(super) lists: Vec<Vec<Id>>,
    pub(super) dicts: Vec<Vec<(Id, Id)>>,
    pub(super) globals: Vec<(&'a [u8], Cow<'a, [u8]>)>,
    pub(super) records: Vec<Record>,
    pub(super) root: Id,
}

impl<'a> Pickle<'a> {
    /// The value of the whole input.
    #[must_use]
    pub fn root(&self) -> Id {
        self.root
    }

    /// The number of values; their numbers are those below.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Never: a pickle is a value at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// A value by its number.
    #[must_use]
    pub fn value(&self, id: Id) -> Value {
        self.values[id as usize]
    }

    /// The bytes of a text, bytes or a long integer.
    #[must_use]
    pub fn bytes(&self, span: Span) -> &'a [u8] {
        &self.input[span.start as usize..][..span.length as usize]
    }

    /// The items of a tuple.
    #[must_use]
    pub fn tuple(&self, span: Span) -> &[Id] {
        &self.tuples[span.start as usize..][..span.length as usize]
    }

    /// The items of a list or a set.
    #[must_use]
    pub fn list(&self, number: u32) -> &[Id] {
        &self.lists[number as usize]
    }

    /// The pairs of a dict.
    #[must_use]
    pub fn dict(&self, number: u32) -> &[(Id, Id)] {
        &self.dicts[number as usize]
    }

    /// Module and name of a global.
    #[must_use]
    pub fn global(&self, number: u32) -> (&[u8], &[u8]) {
        let (module, name) = &self.globals[number as usize];
        (module, name)
    }

    /// Every global that the input names, each once.
    pub fn globals(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.globals.iter().map(|(module, name)| (*module, &**name))
    }

    /// A record.
    #[must_use]
    pub fn record(&self, number: u32) -> &Record {
        &self.records[number as usize]
    }

    /// The pairs that would be set on a record's result.
    #[must_use]
    pub fn items(&self, record: &Record) -> &[(Id, Id)] {
        record.items.map_or(&[], |number| self.dict(number))
    }

    /// The values that would be appended to a record's result.
    #[must_use]
    pub fn elements(&self, record: &Record) -> &[Id] {
        record.elements.map_or(&[], |number| self.list(number))
    }

    /// True if each value can be reached from `roots`, by its number.
    ///
    /// # Errors
    /// [`Error::TooMany`](crate::error::Error::TooMany) if there is not the memory for it.
    pub fn reachable(&self, roots: &[Id]) -> Result<Vec<bool>> {
        let mut seen = room::filled(false, self.len(), VALUES)?;
        let mut open: Vec<Id> = Vec::new();
        let mut visit = |id: Id, open: &mut Vec<Id>| -> Result<()> {
            if !std::mem::replace(&mut seen[id as usize], true) {
                open.room(1, VALUES)?;
                open.push(id);
            }
            Ok(())
        };
        roots.iter().try_for_each(|&id| visit(id, &mut open))?;
        while let Some(id) = open.pop() {
            match self.value(id) {
                Value::Tuple(span) => self.tuple(span).iter().try_for_each(|&id| visit(id, &mut open))?,
                Value::List(number) | Value::Set(number) => {
                    self.list(number).iter().try_for_each(|&id| visit(id, &mut open))?;
                }
                Value::Dict(number) => {
                    self.dict(number)
                        .iter()
                        .try_for_each(|&(k, v)| visit(k, &mut open).and_then(|()| visit(v, &mut open)))?;
                }
                Value::Record(number) => {
                    let record = self.record(number);
                    let ids = [Some(record.callee), Some(record.arguments), record.keywords, record.state];
                    ids.into_iter().flatten().try_for_each(|id| visit(id, &mut open))?;
                    self.elements(record).iter().try_for_each(|&id| visit(id, &mut open))?;
                    self.items(record)
                        .iter()
                        .try_for_each(|&(k, v)| visit(k, &mut open).and_then(|()| visit(v, &mut open)))?;
                }
                Value::Persistent(inner) => visit(inner, &mut open)?,
                _ => {}
            }
        }
        Ok(seen)
    }
}

/// Appends, or says that memory is at its end.
pub(super) fn push<T>(vec: &mut Vec<T>, item: T) -> Result<()> {
    vec.room(1, VALUES)?;
    vec.push(item);
    Ok(())
}
