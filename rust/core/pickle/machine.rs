//! The stack machine: what each opcode does to the stack and to the values.
//!
//! What globals and calls do is in [`super::calls`], what lists and dicts do in [`super::containers`].

use std::{borrow::Cow, collections::HashMap};

use super::{
    memo::Memo,
    opcode as op,
    value::{Id, MAX_BYTES, MAX_INTEGER, Pickle, Span, VALUES, Value, push},
};
use crate::{
    error::{Error, Result},
    parallel::Poll,
    room::{self, Room as _},
    shown::counted,
};

/// The highest protocol that there is.
const PROTOCOL: u8 = 5;

/// The number of opcodes between two polls.
const POLL_EVERY: u32 = 1 << 16;

// Values that nothing can change are there once.
const NONE: Id = 0;
const TRUE: Id = 1;
const FALSE: Id = 2;
const EMPTY_TUPLE: Id = 3;

/// The machine: the values that it noted down, its stack with marks, and its memo.
pub(super) struct Machine<'a> {
    pub(super) pickle: Pickle<'a>,
    at: usize,
    /// The position of the opcode that is being read.
    opcode_at: usize,
    pub(super) stack: Vec<Id>,
    marks: Vec<usize>,
    memo: Memo,
    pub(super) globals: HashMap<(&'a [u8], Cow<'a, [u8]>), Id>,
}

pub(super) fn run<'a>(input: &'a [u8], poll: Poll<'_>) -> Result<Pickle<'a>> {
    if input.len() > MAX_BYTES {
        let problem = format!("is {} bytes long, over the limit of {MAX_BYTES}", input.len());
        return Err(Error::Pickle { at: 0, problem });
    }
    let pickle = Pickle {
        input,
        values: vec![Value::None, Value::Bool(true), Value::Bool(false), Value::Tuple(Span { start: 0, length: 0 })],
        tuples: Vec::new(),
        lists: Vec::new(),
        dicts: Vec::new(),
        globals: Vec::new(),
        records: Vec::new(),
        root: NONE,
    };
    let (stack, marks, memo, globals) = Default::default();
    let mut machine = Machine { pickle, at: 0, opcode_at: 0, stack, marks, memo, globals };
    let mut steps = 0_u32;
    while machine.step()? {
        steps = steps.wrapping_add(1);
        if steps.is_multiple_of(POLL_EVERY) {
            poll()?;
        }
    }
    Ok(machine.pickle)
}

impl<'a> Machine<'a> {
    /// Does one opcode; `false` after the last.
    fn step(&mut self) -> Result<bool> {
        self.opcode_at = self.at;
        match self.byte()? {
            op::PROTO => {
                let protocol = self.byte()?;
                if protocol > PROTOCOL {
                    return Err(self.error(format!("protocol {protocol}; the highest known is {PROTOCOL}")));
                }
            }
            op::FRAME => {
                let length = self.number(8)?;
                if length > self.left() as u64 {
                    return Err(self.error(format!("a frame of {length} bytes, but {} are there", self.left())));
                }
            }
            op::STOP => return self.stop(),
            op::MARK => push(&mut self.marks, self.stack.len())?,
            op::POP => {
                if self.marks.last() == Some(&self.stack.len()) {
                    self.marks.pop();
                } else {
                    self.pop()?;
                }
            }
            op::POP_MARK => {
                let begin = self.unmark()?;
                self.stack.truncate(begin);
            }
            op::DUP => {
                let top = self.top()?;
                push(&mut self.stack, top)?;
            }
            op::NONE => push(&mut self.stack, NONE)?,
            op::NEWTRUE => push(&mut self.stack, TRUE)?,
            op::NEWFALSE => push(&mut self.stack, FALSE)?,
            op::EMPTY_TUPLE => push(&mut self.stack, EMPTY_TUPLE)?,
            op::BININT => {
                let number = self.number(4)? as u32;
                self.give(Value::Int(i64::from(number.cast_signed())))?;
            }
            op::BININT1 => {
                let number = self.number(1)?;
                self.give(Value::Int(number as i64))?;
            }
            op::BININT2 => {
                let number = self.number(2)?;
                self.give(Value::Int(number as i64))?;
            }
            op::LONG1 => self.long(1)?,
            op::LONG4 => self.long(4)?,
            op::BINFLOAT => {
                let bits = self.number(8)?.swap_bytes();
                self.give(Value::Float(f64::from_bits(bits)))?;
            }
            op::SHORT_BINUNICODE => self.span(1, Value::Text)?,
            op::BINUNICODE => self.span(4, Value::Text)?,
            op::BINUNICODE8 => self.span(8, Value::Text)?,
            op::SHORT_BINBYTES => self.span(1, Value::Bytes)?,
            op::BINBYTES => self.span(4, Value::Bytes)?,
            op::BINBYTES8 | op::BYTEARRAY8 => self.span(8, Value::Bytes)?,
            op::TUPLE => {
                let begin = self.unmark()?;
                self.tuple(begin)?;
            }
            op::TUPLE1 => self.tuple_of(1)?,
            op::TUPLE2 => self.tuple_of(2)?,
            op::TUPLE3 => self.tuple_of(3)?,
            op::EMPTY_LIST => {
                let number = self.new_list(Vec::new())?;
                self.give(Value::List(number))?;
            }
            op::LIST => {
                let items = self.marked()?;
                let number = self.new_list(items)?;
                self.give(Value::List(number))?;
            }
            op::APPEND => {
                let item = self.pop()?;
                let list = self.top()?;
                self.extend(list, vec![item])?;
            }
            op::APPENDS => {
                let items = self.marked()?;
                let list = self.top()?;
                self.extend(list, items)?;
            }
            op::EMPTY_SET => {
                let number = self.new_list(Vec::new())?;
                self.give(Value::Set(number))?;
            }
            op::FROZENSET => {
                let items = self.marked()?;
                let number = self.new_list(items)?;
                self.give(Value::Set(number))?;
            }
            op::ADDITEMS => {
                let items = self.marked()?;
                let top = self.top()?;
                let Value::Set(number) = self.pickle.value(top) else {
                    return Err(self.error("adds items to something that is not a set"));
                };
                self.append(number, items)?;
            }
            op::EMPTY_DICT => {
                let number = self.new_dict()?;
                self.give(Value::Dict(number))?;
            }
            op::DICT => {
                let items = self.marked()?;
                let number = self.new_dict()?;
                self.set(number, &items)?;
                self.give(Value::Dict(number))?;
            }
            op::SETITEM => {
                let value = self.pop()?;
                let key = self.pop()?;
                let dict = self.top()?;
                self.set_items(dict, &[key, value])?;
            }
            op::SETITEMS => {
                let items = self.marked()?;
                let dict = self.top()?;
                self.set_items(dict, &items)?;
            }
            op::BINPUT => {
                let key = self.number(1)? as u32;
                let top = self.top()?;
                self.memo.put(key, top)?;
            }
            op::LONG_BINPUT => {
                let key = self.number(4)? as u32;
                let top = self.top()?;
                self.memo.put(key, top)?;
            }
            op::MEMOIZE => {
                let top = self.top()?;
                let key = self.memo.len() as u32; // At most one for each byte of the input.
                self.memo.put(key, top)?;
            }
            op::BINGET => self.recall(1)?,
            op::LONG_BINGET => self.recall(4)?,
            op::GLOBAL => {
                let module = self.line()?;
                let name = self.line()?;
                self.give_global(module, Cow::Borrowed(name))?;
            }
            op::STACK_GLOBAL => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Value::Text(module), Value::Text(name)) = (self.pickle.value(module), self.pickle.value(name))
                else {
                    return Err(self.error("names a global with something that is not text"));
                };
                self.give_global(self.pickle.bytes(module), Cow::Borrowed(self.pickle.bytes(name)))?;
            }
            op::REDUCE | op::NEWOBJ => {
                let (arguments, callee) = (self.pop()?, self.pop()?);
                self.call(callee, arguments, None)?;
            }
            op::NEWOBJ_EX => {
                let (keywords, arguments, callee) = (self.pop()?, self.pop()?, self.pop()?);
                if !matches!(self.pickle.value(keywords), Value::Dict(_)) {
                    return Err(self.error("calls with keyword arguments that are not a dict"));
                }
                self.call(callee, arguments, Some(keywords))?;
            }
            op::BUILD => {
                let state = self.pop()?;
                let top = self.top()?;
                let Value::Record(number) = self.pickle.value(top) else {
                    return Err(self.error("gives a state to something that is not an object"));
                };
                let record = &mut self.pickle.records[number as usize];
                if record.state.replace(state).is_some() {
                    return Err(self.error("gives a second state to an object"));
                }
            }
            op::BINPERSID => {
                let id = self.pop()?;
                self.give(Value::Persistent(id))?;
            }
            other => {
                let what = op::refused(other).unwrap_or("not an opcode");
                return Err(self.error(format!("0x{other:02x} is {what}")));
            }
        }
        Ok(true)
    }

    fn stop(&mut self) -> Result<bool> {
        self.pickle.root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            let (values, marks) = (self.stack.len(), self.marks.len());
            let values = counted(&values, "value", "values");
            let marks = counted(&marks, "mark", "marks");
            return Err(self.error(format!("ends with {values} and {marks} left on the stack")));
        }
        if self.left() > 0 {
            return Err(self.error(format!("has {} after its end", counted(&self.left(), "byte", "bytes"))));
        }
        self.check_getattr()?;
        Ok(false)
    }

    pub(super) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Pickle { at: self.opcode_at, problem: problem.into() }
    }

    fn left(&self) -> usize {
        self.pickle.input.len() - self.at
    }

    fn byte(&mut self) -> Result<u8> {
        self.number(1).map(|byte| byte as u8)
    }

    /// A little-endian number of `size` bytes, at most 8.
    fn number(&mut self, size: usize) -> Result<u64> {
        let span = self.take(size as u64)?;
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(self.pickle.bytes(span));
        Ok(u64::from_le_bytes(bytes))
    }

    fn take(&mut self, length: u64) -> Result<Span> {
        if length > self.left() as u64 {
            return Err(self.error(format!(
                "{} needed, but only {} left",
                counted(&length, "byte", "bytes"),
                self.left()
            )));
        }
        let span = Span { start: self.at as u32, length: length as u32 }; // The input is at most MAX_BYTES long.
        self.at += length as usize;
        Ok(span)
    }

    /// The text up to the next line feed.
    fn line(&mut self) -> Result<&'a [u8]> {
        let rest = &self.pickle.input[self.at..];
        let Some(length) = rest.iter().position(|&byte| byte == b'\n') else {
            return Err(self.error("a line without an end"));
        };
        self.at += length + 1;
        Ok(&rest[..length])
    }

    pub(super) fn give(&mut self, value: Value) -> Result<()> {
        let id = self.pickle.values.len();
        // Fewer values than bytes, four aside, so that their numbers fit in 32 bits.
        push(&mut self.pickle.values, value)?;
        push(&mut self.stack, id as Id)
    }

    /// The height of the stack below the innermost mark.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(self.error("takes from an empty stack"));
        }
        self.stack.pop().ok_or_else(|| self.error("takes from an empty stack"))
    }

    fn top(&self) -> Result<Id> {
        self.stack.last().copied().ok_or_else(|| self.error("looks at an empty stack"))
    }

    fn unmark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or_else(|| self.error("goes back to a mark that does not exist"))
    }

    fn marked(&mut self) -> Result<Vec<Id>> {
        let begin = self.unmark()?;
        let mut items = room::list(self.stack.len() - begin, VALUES)?;
        items.extend(self.stack.drain(begin..));
        Ok(items)
    }

    fn tuple(&mut self, begin: usize) -> Result<()> {
        if begin == self.stack.len() {
            return push(&mut self.stack, EMPTY_TUPLE);
        }
        let (start, length) = (self.pickle.tuples.len(), self.stack.len() - begin);
        self.pickle.tuples.room(length, VALUES)?;
        self.pickle.tuples.extend(self.stack.drain(begin..));
        // An item takes an opcode, so that there are fewer than bytes.
        self.give(Value::Tuple(Span { start: start as u32, length: length as u32 }))
    }

    fn tuple_of(&mut self, length: usize) -> Result<()> {
        match self.stack.len().checked_sub(length) {
            Some(begin) if begin >= self.floor() => self.tuple(begin),
            _ => Err(self.error("takes from an empty stack")),
        }
    }

    fn long(&mut self, size: usize) -> Result<()> {
        let length = self.number(size)?;
        if length > MAX_INTEGER as u64 {
            return Err(self.error(format!("an integer of {length} bytes, over the limit of {MAX_INTEGER}")));
        }
        let span = self.take(length)?;
        let bytes = self.pickle.bytes(span);
        if bytes.len() > 8 {
            return self.give(Value::Long(span));
        }
        let sign = if bytes.last().is_some_and(|&byte| byte >= 0x80) { 0xff } else { 0 };
        let mut wide = [sign; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.give(Value::Int(i64::from_le_bytes(wide)))
    }

    fn span(&mut self, size: usize, kind: fn(Span) -> Value) -> Result<()> {
        let length = self.number(size)?;
        let span = self.take(length)?;
        self.give(kind(span))
    }

    fn recall(&mut self, size: usize) -> Result<()> {
        let key = self.number(size)? as u32;
        let Some(id) = self.memo.get(key) else {
            return Err(self.error(format!("asks the memo for {key}, which it does not hold")));
        };
        push(&mut self.stack, id)
    }
}
