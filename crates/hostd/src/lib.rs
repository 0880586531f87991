//! The privileged primitives of a node: the btrfs pool, cgroups, processes of their own user, and what the host offers.
//!
//! Every function takes ids and validated values and does one thing. Nothing here runs a shell, looks a program up in
//! `PATH`, reads a configuration file or knows what a sandbox is for: it must stay small enough to become a process of
//! its own, the only one on a node with root's rights.

pub mod btrfs;
pub mod build;
pub mod cgroup;
pub mod host;
pub mod jail;
mod kvm;
pub mod points;
pub mod pool;
pub mod probe;
pub mod process;
pub mod protocol;
pub mod seccomp;
pub mod server;
pub mod service;
mod spawn;
pub mod uids;
