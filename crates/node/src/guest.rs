//! The channel into one guest: a link session with gRPC in it, made again when it breaks while the VM lives.
//!
//! The guest is hostile: this never waits without a limit and never holds more than one connection.

use std::sync::Arc;
use std::time::Duration;

use space_core::SandboxId;
use space_proto::guest::guest_client::GuestClient;
use space_proto::guest::{Hello, HelloAck, RefreshRequest};
use space_proto::link::{Carrier, LinkError};
use space_proto::{GUEST_PROTOCOL, link};
use space_vmm::Vm;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::NodeError;

/// For a guest that runs; emulated and one of many on few cores.
const RECONNECT: Duration = Duration::from_secs(20);

pub struct Guest {
    vm: Arc<dyn Vm>,
    current: Mutex<Current>,
}

struct Current {
    channel: Option<Channel>,
    /// Counts the connections, so that only the one that failed is thrown away.
    epoch: u64,
}

fn hello(sandbox: Option<&SandboxId>, run: u32, refresh: Option<RefreshRequest>) -> Hello {
    let sandbox = sandbox.map(ToString::to_string).unwrap_or_default();
    Hello { protocol: GUEST_PROTOCOL, sandbox, run, refresh }
}

async fn open(vm: &Arc<dyn Vm>, hello: Hello, limit: Duration) -> Result<(Channel, HelloAck), NodeError> {
    let deadline = Instant::now() + limit;
    let carrier = if vm.agent_connects() { Carrier::Connection } else { Carrier::Channel };
    let stream = tokio::time::timeout_at(deadline, vm.agent()).await.map_err(|_| LinkError::Timeout)??;
    let (stream, ack) = link::connect(stream, carrier, hello, deadline).await?;
    Ok((link::guest_channel(stream), ack))
}

impl Guest {
    /// Connects with a refresh; the guest is usable only if this succeeds.
    pub async fn refreshed(
        vm: Arc<dyn Vm>,
        sandbox: Option<&SandboxId>,
        run: u32,
        refresh: RefreshRequest,
        limit: Duration,
    ) -> Result<Self, NodeError> {
        let (channel, ack) = open(&vm, hello(sandbox, run, Some(refresh)), limit).await?;
        if ack.refresh.is_none() {
            return Err(NodeError::Guest("it did not confirm its refresh".to_owned()));
        }
        Ok(Self { vm, current: Mutex::new(Current { channel: Some(channel), epoch: 1 }) })
    }

    /// Of a VM that was adopted: connects when first needed, without a refresh.
    pub fn adopted(vm: Arc<dyn Vm>) -> Self {
        Self { vm, current: Mutex::new(Current { channel: None, epoch: 0 }) }
    }

    /// The channel and its number, for [`Guest::lost`].
    pub async fn channel(&self) -> Result<(Channel, u64), NodeError> {
        let mut current = self.current.lock().await;
        if let Some(channel) = &current.channel {
            return Ok((channel.clone(), current.epoch));
        }
        let (channel, _) = open(&self.vm, hello(None, 0, None), RECONNECT).await?;
        current.epoch += 1;
        current.channel = Some(channel.clone());
        Ok((channel, current.epoch))
    }

    pub async fn client(&self) -> Result<(GuestClient<Channel>, u64), NodeError> {
        let (channel, epoch) = self.channel().await?;
        Ok((GuestClient::new(channel), epoch))
    }

    /// The connection of that number failed: the next caller makes a new one.
    pub async fn lost(&self, epoch: u64) {
        let mut current = self.current.lock().await;
        if current.epoch == epoch {
            current.channel = None;
        }
    }
}
