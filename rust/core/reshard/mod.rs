//! From one partition to another: what must move, and in which order (rule 2.6).
//!
//! | module | answers |
//! |---|---|
//! | [`intersect`] | which source shards lie under each destination shard, dim by dim |
//! | [`plan`] | the transfers: who sends which box to whom |
//! | `balance` | which of the replicas of a shard sends |
//! | [`coverage`] | whether boxes made by hand tile a tensor |
//! | [`rounds`] | the transfers in rounds, each within a budget of memory |

mod balance;
pub mod coverage;
pub mod intersect;
pub mod plan;
pub mod rounds;
