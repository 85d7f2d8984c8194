//! The memo of the machine: values under numbers, to be put on the stack again.

use std::collections::HashMap;

use super::value::{Id, VALUES, push};
use crate::{error::Result, room::Room as _};

/// The values of the memo: real pickles number without a gap, others may number as they like.
#[derive(Default)]
pub(super) struct Memo {
    dense: Vec<Id>,
    sparse: HashMap<u32, Id>,
}

impl Memo {
    pub(super) fn put(&mut self, key: u32, id: Id) -> Result<()> {
        if let Some(held) = self.dense.get_mut(key as usize) {
            *held = id;
        } else if key as usize == self.dense.len() && !self.sparse.contains_key(&key) {
            push(&mut self.dense, id)?;
        } else {
            self.sparse.room(1, VALUES)?;
            self.sparse.insert(key, id);
        }
        Ok(())
    }

    pub(super) fn get(&self, key: u32) -> Option<Id> {
        self.dense.get(key as usize).or_else(|| self.sparse.get(&key)).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.dense.len() + self.sparse.len()
    }
}
