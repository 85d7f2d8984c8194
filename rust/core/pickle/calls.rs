//! Globals and calls, which are noted down and never run, and the one use of `getattr` that is allowed.

use std::borrow::Cow;

use super::{
    machine::Machine,
    value::{Id, MAX_NAME, Record, VALUES, Value, push},
};
use crate::{error::Result, room::Room as _};

/// The problem of a `getattr` that does not name a nested class.
const GETATTR: &str = "names 'builtins.getattr', which serves to run programs, for something other than an attribute of a \
                       global; nothing was run, the file is refused";

impl<'a> Machine<'a> {
    pub(super) fn give_global(&mut self, module: &'a [u8], name: Cow<'a, [u8]>) -> Result<()> {
        let longest = module.len().max(name.len());
        if longest > MAX_NAME {
            return Err(self.error(format!("a global of {longest} bytes, over the limit of {MAX_NAME}")));
        }
        let key = (module, name);
        if let Some(&id) = self.globals.get(&key) {
            return push(&mut self.stack, id);
        }
        self.globals.room(1, VALUES)?;
        self.globals.insert(key.clone(), self.pickle.values.len() as Id);
        if matches!(key.0, b"builtins" | b"__builtin__") && *key.1 == *b"getattr" {
            return self.give(Value::Getattr);
        }
        let number = self.pickle.globals.len() as u32;
        push(&mut self.pickle.globals, key)?;
        self.give(Value::Global(number))
    }

    /// The class nested in another, which a call of `getattr` names; pickles before protocol 4 name it so.
    fn attribute(&mut self, arguments: Id) -> Result<()> {
        if let Value::Tuple(span) = self.pickle.value(arguments)
            && let &[of, attribute] = self.pickle.tuple(span)
            && let (Value::Global(number), Value::Text(text)) = (self.pickle.value(of), self.pickle.value(attribute))
        {
            let (module, name) = &self.pickle.globals[number as usize];
            let (module, text) = (*module, self.pickle.bytes(text));
            let length = name.len().saturating_add(text.len());
            if length >= MAX_NAME {
                return Err(self.error(format!("a global of {length} bytes, over the limit of {MAX_NAME}")));
            }
            let name = [name, &b"."[..], text].concat();
            return self.give_global(module, Cow::Owned(name));
        }
        Err(self.error(GETATTR))
    }

    /// Refuses an input in which `getattr` is anything but called by [`Self::attribute`].
    pub(super) fn check_getattr(&self) -> Result<()> {
        let pickle = &self.pickle;
        let is_it = |&id: &Id| pickle.value(id) == Value::Getattr;
        let in_a_value = || pickle.values.iter().any(|value| matches!(value, Value::Persistent(id) if is_it(id)));
        let in_a_list = || pickle.lists.iter().flatten().chain(&pickle.tuples).any(is_it);
        let in_a_dict = || pickle.dicts.iter().flatten().any(|(key, value)| is_it(key) || is_it(value));
        let in_a_state = || pickle.records.iter().any(|record| record.state.as_ref().is_some_and(is_it));
        if pickle.values.contains(&Value::Getattr)
            && (is_it(&pickle.root) || in_a_list() || in_a_dict() || in_a_state() || in_a_value())
        {
            return Err(self.error(GETATTR));
        }
        Ok(())
    }

    pub(super) fn call(&mut self, callee: Id, arguments: Id, keywords: Option<Id>) -> Result<()> {
        match self.pickle.value(callee) {
            Value::Global(_) => {}
            Value::Getattr if keywords.is_none() => return self.attribute(arguments),
            Value::Getattr => return Err(self.error(GETATTR)),
            _ => return Err(self.error("calls something that is not a global")),
        }
        if !matches!(self.pickle.value(arguments), Value::Tuple(_)) {
            return Err(self.error("calls with arguments that are not a tuple"));
        }
        let number = self.pickle.records.len() as u32;
        let record = Record { callee, arguments, keywords, state: None, items: None, elements: None };
        push(&mut self.pickle.records, record)?;
        self.give(Value::Record(number))
    }
}
