//! Lists and dicts, and those of a record, which grow after they were made.

use super::{
    machine::Machine,
    value::{Id, VALUES, Value, push},
};
use crate::{error::Result, room::Room as _};

impl Machine<'_> {
    pub(super) fn new_list(&mut self, items: Vec<Id>) -> Result<u32> {
        let number = self.pickle.lists.len() as u32;
        push(&mut self.pickle.lists, items)?;
        Ok(number)
    }

    pub(super) fn new_dict(&mut self) -> Result<u32> {
        let number = self.pickle.dicts.len() as u32;
        push(&mut self.pickle.dicts, Vec::new())?;
        Ok(number)
    }

    pub(super) fn append(&mut self, number: u32, items: Vec<Id>) -> Result<()> {
        let list = &mut self.pickle.lists[number as usize];
        list.room(items.len(), VALUES)?;
        list.extend(items);
        Ok(())
    }

    pub(super) fn extend(&mut self, target: Id, items: Vec<Id>) -> Result<()> {
        match self.pickle.value(target) {
            Value::List(number) => self.append(number, items),
            Value::Record(number) => {
                let list = match self.pickle.records[number as usize].elements {
                    Some(list) => list,
                    None => self.new_list(Vec::new())?,
                };
                self.pickle.records[number as usize].elements = Some(list);
                self.append(list, items)
            }
            _ => Err(self.error("appends to something that is not a list")),
        }
    }

    pub(super) fn set(&mut self, number: u32, items: &[Id]) -> Result<()> {
        if !items.len().is_multiple_of(2) {
            return Err(self.error("sets a key without a value"));
        }
        let dict = &mut self.pickle.dicts[number as usize];
        dict.room(items.len() / 2, VALUES)?;
        dict.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1])));
        Ok(())
    }

    pub(super) fn set_items(&mut self, target: Id, items: &[Id]) -> Result<()> {
        match self.pickle.value(target) {
            Value::Dict(number) => self.set(number, items),
            Value::Record(number) => {
                let dict = match self.pickle.records[number as usize].items {
                    Some(dict) => dict,
                    None => self.new_dict()?,
                };
                self.pickle.records[number as usize].items = Some(dict);
                self.set(dict, items)
            }
            _ => Err(self.error("sets an item of something that is not a dict")),
        }
    }
}
